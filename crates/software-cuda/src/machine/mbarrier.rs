//! An mbarrier in shared memory.

/// State in the eight bytes of an mbarrier.
#[derive(Clone, Copy, Debug)]
pub struct Mbarrier {
    /// Whether the current phase is an odd one.
    pub odd: bool,
    /// Arrivals of each phase.
    pub count: i32,
    /// Pending arrivals of the current phase.
    pub pending: i32,
    /// Pending bytes; negative if more bytes have arrived than were expected so far.
    pub bytes: i32,
}

impl Mbarrier {
    /// Decodes the bits.
    pub fn from_bits(bits: u64) -> Mbarrier {
        let bytes = (bits >> 40 & 0x7F_FFFF) as i32;
        Mbarrier {
            odd: bits >> 63 != 0,
            count: (bits & 0xF_FFFF) as i32,
            pending: (bits >> 20 & 0xF_FFFF) as i32,
            bytes: bytes << 9 >> 9,
        }
    }

    /// Encodes the state.
    pub fn bits(self) -> u64 {
        let bytes = u64::from(self.bytes as u32 & 0x7F_FFFF);
        u64::from(self.odd) << 63 | bytes << 40 | (self.pending as u64) << 20 | self.count as u64
    }

    /// Whether the bits are an mbarrier's: the initial contents of shared memory are not, nor is an invalidated one.
    pub fn valid(self) -> bool {
        (1..0xF_FFFF).contains(&self.count) && self.pending <= self.count
    }
}
