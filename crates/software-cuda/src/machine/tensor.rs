//! Tensor maps, and copies of boxes.

/// Swizzle of a box in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Swizzle {
    /// No swizzle.
    None = 0,
    /// Within 32 bytes.
    B32 = 1,
    /// Within 64 bytes.
    B64 = 2,
    /// Within 128 bytes.
    B128 = 3,
}

impl Swizzle {
    /// Swizzled address: the bits from bit 4 on, as many as the mode has, are XORed with those from bit 7 on.
    #[inline(always)]
    pub fn apply(self, at: usize) -> usize {
        at ^ (at >> 3 & (((1 << self as usize) - 1) << 4))
    }
}

const MAGIC: u64 = 0x736f_6674_6d61_7001;

/// A tensor map as stored in its 128 opaque bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(8))]
pub struct TensorMap {
    magic: u64,
    /// Address of the tensor.
    pub address: u64,
    /// Extents, innermost dimension first.
    pub extents: [u64; 5],
    /// Strides in bytes, of all dimensions but the first.
    pub strides: [u64; 4],
    /// Extents of a box.
    pub sides: [u16; 5],
    /// Number of dimensions.
    pub rank: u8,
    /// Bytes of an element.
    pub element: u8,
    /// Swizzle of boxes in shared memory.
    pub swizzle: Swizzle,
}

const _: () = assert!(size_of::<TensorMap>() <= 128);

impl TensorMap {
    /// Creates a tensor map.
    pub fn new(
        address: u64,
        element: u8,
        extents: &[u64],
        strides: &[u64],
        sides: &[u32],
        swizzle: Swizzle,
    ) -> TensorMap {
        let mut map = TensorMap {
            magic: MAGIC,
            address,
            extents: [1; 5],
            strides: [0; 4],
            sides: [1; 5],
            rank: extents.len() as u8,
            element,
            swizzle,
        };
        map.extents[..extents.len()].copy_from_slice(extents);
        map.strides[..strides.len()].copy_from_slice(strides);
        map.sides.iter_mut().zip(sides).for_each(|(side, given)| *side = *given as u16);
        map
    }

    /// Reads the tensor map at an address, if there is one.
    ///
    /// # Safety
    ///
    /// 128 bytes may be read at the address.
    pub unsafe fn read(at: *const u8) -> Option<TensorMap> {
        let swizzle = std::mem::offset_of!(TensorMap, swizzle);
        // SAFETY: the caller guarantees it. Any bits form a map except the swizzle's, which are checked before the map is read.
        unsafe {
            let is_map = at.cast::<u64>().read_unaligned() == MAGIC && at.add(swizzle).read() <= Swizzle::B128 as u8;
            is_map.then(|| at.cast::<TensorMap>().read_unaligned())
        }
    }

    /// Bytes of a box.
    pub fn box_bytes(&self) -> usize {
        self.sides.iter().map(|side| usize::from(*side)).product::<usize>() * usize::from(self.element)
    }

    /// Lines of a box at these coordinates. For each line: the address of its part within the tensor, the line's offset in the box, and the
    /// offsets at which that part begins and ends, in bytes. The part is empty if the line is outside the tensor.
    pub fn lines(&self, at: [i32; 5]) -> impl Iterator<Item = (u64, usize, std::ops::Range<usize>)> + '_ {
        let element = u64::from(self.element);
        let side = i64::from(self.sides[0]);
        let begin = i64::from(-at[0]).clamp(0, side);
        let end = (self.extents[0] as i64 - i64::from(at[0])).clamp(begin, side);
        let count = self.sides[1..].iter().map(|side| usize::from(*side)).product::<usize>();
        (0..count).map(move |nth| {
            let mut rest = nth;
            let mut inside = true;
            let mut address = self.address.wrapping_add(((i64::from(at[0]) + begin) as u64).wrapping_mul(element));
            for (dimension, first) in at.into_iter().enumerate().skip(1) {
                let side = usize::from(self.sides[dimension]);
                let index = i64::from(first) + (rest % side) as i64;
                rest /= side;
                inside &= (0..self.extents[dimension] as i64).contains(&index);
                address = address.wrapping_add((index as u64).wrapping_mul(self.strides[dimension - 1]));
            }
            let part = if inside { begin as usize..end as usize } else { 0..0 };
            let bytes = self.element as usize;
            (address, nth * side as usize * bytes, part.start * bytes..part.end * bytes)
        })
    }
}
