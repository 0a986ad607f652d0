//! Arithmetic of a whole warp: a function of numbers becomes a loop over 32 lanes, which the compiler vectorizes.

/// Lanes of a warp.
pub const LANES: usize = 32;

/// A line of the register file: 32 bits for each lane. A register of 64 bits takes two lines, which hold 32 words of 64 bits.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub struct Line(pub [u32; LANES]);

/// A number type as stored in a lane of a register.
pub trait Lane: Copy {
    /// Type of the stored word.
    type Word: Copy + Default;
    /// Whether it takes 64 bits.
    const WIDE: bool;
    /// Converts from the stored word.
    fn get(word: Self::Word) -> Self;
    /// Converts to the stored word.
    fn put(self) -> Self::Word;
}

macro_rules! lane {
    ($($ty:ty, $word:ty, $wide:literal, $get:expr, $put:expr;)*) => {$(
        impl Lane for $ty {
            type Word = $word;
            const WIDE: bool = $wide;
            #[inline(always)]
            fn get(word: $word) -> Self {
                let get: fn($word) -> Self = $get;
                get(word)
            }
            #[inline(always)]
            fn put(self) -> $word {
                let put: fn(Self) -> $word = $put;
                put(self)
            }
        }
    )*};
}

lane! {
    u8, u32, false, |word| word as u8, |x| u32::from(x);
    i8, u32, false, |word| word as i8, |x| x as i32 as u32;
    u16, u32, false, |word| word as u16, |x| u32::from(x);
    i16, u32, false, |word| word as i16, |x| u32::from(x as u16);
    u32, u32, false, |word| word, |x| x;
    i32, u32, false, |word| word as i32, |x| x as u32;
    f32, u32, false, f32::from_bits, f32::to_bits;
    u64, u64, true, |word| word, |x| x;
    i64, u64, true, |word| word as i64, |x| x as u64;
    f64, u64, true, f64::from_bits, f64::to_bits;
}

/// A function of up to three registers.
#[derive(Clone, Copy, Debug)]
pub struct Alu {
    /// Reads the operands and writes the result to the first pointer. Operands beyond the arity are not read. The result may be one of the
    /// operands.
    pub run: unsafe fn(*mut u32, *const u32, *const u32, *const u32),
    /// Whether the result and the operands take 64 bits.
    pub wide: [bool; 4],
    /// Number of operands.
    pub arity: usize,
}

/// A comparison of two registers, which returns the lanes where it holds.
#[derive(Clone, Copy, Debug)]
pub struct Compare {
    /// Compares two registers.
    pub run: unsafe fn(*const u32, *const u32) -> u32,
    /// Whether the operands take 64 bits.
    pub wide: bool,
}

/// Recreates a function that captures nothing from its type.
fn conjure<F: Copy>() -> F {
    const { assert!(size_of::<F>() == 0) };
    // SAFETY: the type has no size, and a value of it exists: it was passed to `lanes*` or `compare`.
    unsafe { std::ptr::NonNull::<F>::dangling().read() }
}

unsafe fn run<O: Lane, A: Lane, B: Lane, C: Lane, F: Fn(A, B, C) -> O + Copy>(
    out: *mut u32,
    a: *const u32,
    b: *const u32,
    c: *const u32,
) {
    let f = conjure::<F>();
    let mut result = [O::Word::default(); LANES];
    // SAFETY: registers are as wide as `Alu::wide` says.
    let (a, b, c) =
        unsafe { (&*a.cast::<[A::Word; LANES]>(), &*b.cast::<[B::Word; LANES]>(), &*c.cast::<[C::Word; LANES]>()) };
    for lane in 0..LANES {
        result[lane] = f(A::get(a[lane]), B::get(b[lane]), C::get(c[lane])).put();
    }
    // SAFETY: as above.
    unsafe { out.cast::<[O::Word; LANES]>().write(result) };
}

/// Applies a function of three operands.
pub fn lanes3<O: Lane, A: Lane, B: Lane, C: Lane, F: Fn(A, B, C) -> O + Copy>(_: F) -> Alu {
    Alu { run: run::<O, A, B, C, F>, wide: [O::WIDE, A::WIDE, B::WIDE, C::WIDE], arity: 3 }
}

/// Applies a function of two operands.
pub fn lanes2<O: Lane, A: Lane, B: Lane, F: Fn(A, B) -> O + Copy>(f: F) -> Alu {
    Alu { arity: 2, ..lanes3(move |a: A, b: B, _: u32| f(a, b)) }
}

/// Applies a function of one operand.
pub fn lanes1<O: Lane, A: Lane, F: Fn(A) -> O + Copy>(f: F) -> Alu {
    Alu { arity: 1, ..lanes3(move |a: A, _: u32, _: u32| f(a)) }
}

unsafe fn run_compare<A: Lane, F: Fn(A, A) -> bool + Copy>(a: *const u32, b: *const u32) -> u32 {
    let f = conjure::<F>();
    // SAFETY: registers are as wide as `Compare::wide` says.
    let (a, b) = unsafe { (&*a.cast::<[A::Word; LANES]>(), &*b.cast::<[A::Word; LANES]>()) };
    let mut lanes = 0;
    for lane in 0..LANES {
        lanes |= u32::from(f(A::get(a[lane]), A::get(b[lane]))) << lane;
    }
    lanes
}

/// Applies a comparison.
pub fn compare<A: Lane, F: Fn(A, A) -> bool + Copy>(_: F) -> Compare {
    Compare { run: run_compare::<A, F>, wide: A::WIDE }
}
