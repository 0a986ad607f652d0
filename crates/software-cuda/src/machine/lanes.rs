//! Arithmetic of a whole warp: a function of numbers becomes a loop over 32 lanes, which the compiler makes vectors of.

/// Lanes of a warp.
pub const LANES: usize = 32;

/// 32 bits for each lane. A register of 64 bits takes two lines, and is 32 words of 64 bits in memory.
#[derive(Clone, Copy)]
#[repr(C, align(128))]
pub struct Line(pub [u32; LANES]);

/// A number as it lies in a lane of a register.
pub trait Lane: Copy {
    /// What lies there.
    type Word: Copy + Default;
    /// Whether it takes 64 bits.
    const WIDE: bool;
    /// Reads it.
    fn get(word: Self::Word) -> Self;
    /// What to write.
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
    /// Reads three registers and writes the first; those that it does not need it does not read. It may be one of them.
    pub run: unsafe fn(*mut u32, *const u32, *const u32, *const u32),
    /// Whether the result and the operands take 64 bits.
    pub wide: [bool; 4],
    /// Operands.
    pub arity: usize,
}

/// A comparison of two registers: the lanes where it holds.
#[derive(Clone, Copy, Debug)]
pub struct Compare {
    /// Reads two registers.
    pub run: unsafe fn(*const u32, *const u32) -> u32,
    /// Whether they take 64 bits.
    pub wide: bool,
}

/// A function that captures nothing, of which there is only one value.
fn conjure<F: Copy>() -> F {
    const { assert!(size_of::<F>() == 0) };
    // SAFETY: it has no size, and one such value exists: `lanes*` were given it.
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

/// A function of three operands.
pub fn lanes3<O: Lane, A: Lane, B: Lane, C: Lane, F: Fn(A, B, C) -> O + Copy>(_: F) -> Alu {
    Alu { run: run::<O, A, B, C, F>, wide: [O::WIDE, A::WIDE, B::WIDE, C::WIDE], arity: 3 }
}

/// A function of two operands.
pub fn lanes2<O: Lane, A: Lane, B: Lane, F: Fn(A, B) -> O + Copy>(f: F) -> Alu {
    Alu { arity: 2, ..lanes3(move |a: A, b: B, _: u32| f(a, b)) }
}

/// A function of one operand.
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

/// A comparison.
pub fn compare<A: Lane, F: Fn(A, A) -> bool + Copy>(_: F) -> Compare {
    Compare { run: run_compare::<A, F>, wide: A::WIDE }
}
