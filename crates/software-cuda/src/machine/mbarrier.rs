//! A barrier in shared memory.

/// What is in the eight bytes of a barrier.
#[derive(Clone, Copy, Debug)]
pub struct Mbarrier {
    /// Whether the phase that is not over is an odd one.
    pub odd: bool,
    /// Arrivals of a phase.
    pub count: i32,
    /// Those that are still to come.
    pub pending: i32,
    /// Bytes that are still to come; negative if more have come than were expected yet.
    pub bytes: i32,
}

impl Mbarrier {
    /// Takes the bits apart.
    pub fn from_bits(bits: u64) -> Mbarrier {
        let bytes = (bits >> 40 & 0x7F_FFFF) as i32;
        Mbarrier {
            odd: bits >> 63 != 0,
            count: (bits & 0xF_FFFF) as i32,
            pending: (bits >> 20 & 0xF_FFFF) as i32,
            bytes: bytes << 9 >> 9,
        }
    }

    /// The bits.
    pub fn bits(self) -> u64 {
        let bytes = u64::from(self.bytes as u32 & 0x7F_FFFF);
        u64::from(self.odd) << 63 | bytes << 40 | (self.pending as u64) << 20 | self.count as u64
    }

    /// Whether it may be one: what a block finds there is none, nor is one that was made invalid.
    pub fn valid(self) -> bool {
        (1..0xF_FFFF).contains(&self.count) && self.pending <= self.count
    }
}
