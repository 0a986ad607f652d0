//! A kernel as it is run: registers are lines of a warp's file, constants too, labels are numbers.

use super::lanes::{Alu, Compare};
use super::operands::Operands;

/// No instruction's number.
pub const NOWHERE: u32 = u32::MAX;

/// A line of the register file.
pub type Slot = u32;

/// A number that a warp finds out when it starts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Special {
    /// `%tid`, of a dimension.
    Thread(usize),
    /// `%ntid`.
    Threads(usize),
    /// `%ctaid`.
    Block(usize),
    /// `%nctaid`.
    Blocks(usize),
    /// `%laneid`.
    Lane,
    /// `%warpid`.
    Warp,
    /// `%nwarpid`.
    Warps,
    /// `%smid`.
    Multiprocessor,
    /// `%lanemask_…`: lanes so related to this one.
    LaneMask(std::cmp::Ordering, bool),
    /// `%dynamic_smem_size`.
    DynamicShared,
    /// Where parameters lie, and the offset of one. 64 bits.
    Parameter(usize),
    /// The same number always.
    Constant(u32),
}

/// What a space an address belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Any.
    Generic,
    /// Of the device.
    Global,
    /// Of the block.
    Shared,
    /// Of the thread.
    Local,
    /// Parameters of the kernel.
    Parameter,
}

/// An address of each lane.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    /// Its space.
    pub space: Space,
    /// The register that it counts from.
    pub base: Option<Slot>,
    /// Whether that takes 64 bits.
    pub wide: bool,
    /// Bytes from there.
    pub offset: i64,
}

/// A register of 32 or 64 bits.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// Its first line.
    pub slot: Slot,
    /// Whether it takes 64 bits.
    pub wide: bool,
}

/// A predicate as an operand.
#[derive(Clone, Copy, Debug)]
pub struct Predicate {
    /// Its number; 0 is false always.
    pub index: u32,
    /// What its lanes are exchanged with.
    pub flip: u32,
}

/// How predicates are combined.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logic {
    /// Both.
    And,
    /// Any.
    Or,
    /// One.
    Xor,
}

/// Which lane a shuffle reads.
#[derive(Clone, Copy, Debug)]
pub enum Shuffle {
    /// A lower one.
    Up,
    /// A higher one.
    Down,
    /// One with exchanged bits.
    Butterfly,
    /// The one of this number.
    Index,
}

/// What a vote tells.
#[derive(Clone, Copy, Debug)]
pub enum Vote {
    /// Whether all say so.
    All(u32),
    /// Whether any does.
    Any(u32),
    /// Whether all say the same.
    Uniform(u32),
    /// Who does.
    Ballot(Slot),
}

/// What an atomic operation makes of memory and an operand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// `add` of integers.
    Add,
    /// `add` of f32.
    AddF32,
    /// `add` of f64.
    AddF64,
    /// `add` of f16, twice.
    AddF16x2,
    /// `add` of bf16, twice.
    AddBf16x2,
    /// `add` of one f16.
    AddF16,
    /// `add` of one bf16.
    AddBf16,
    /// `min`, of signed integers or not.
    Min(bool),
    /// `max`, of signed integers or not.
    Max(bool),
    /// `inc`.
    Increment,
    /// `dec`.
    Decrement,
    /// `exch`.
    Exchange,
    /// `cas`.
    CompareExchange,
    /// `and`.
    And,
    /// `or`.
    Or,
    /// `xor`.
    Xor,
}

/// Sixteen-bit elements of products, or wider ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// tf32.
    Tf32,
}

/// Where the first operand of a warpgroup's product is.
#[derive(Clone, Copy, Debug)]
pub enum Left {
    /// In four registers.
    Registers([Slot; 4]),
    /// In shared memory, by its descriptor; whether it is MN-major.
    Shared(Slot, bool),
}

/// A product of a warpgroup.
#[derive(Clone, Debug)]
pub struct Wgmma {
    /// What is multiplied.
    pub element: Element,
    /// Columns.
    pub columns: usize,
    /// The accumulator.
    pub sums: Box<[Slot]>,
    /// The first operand.
    pub a: Left,
    /// The descriptor of the second one.
    pub b: Slot,
    /// Whether that is MN-major.
    pub b_transposed: bool,
    /// Whether what the accumulator holds counts.
    pub adds: Predicate,
    /// Whether operands are negated.
    pub negated: [bool; 2],
}

/// A product of a warp.
#[derive(Clone, Debug)]
pub struct Mma {
    /// What is multiplied.
    pub element: Element,
    /// The depth: 4, 8 or 16.
    pub depth: usize,
    /// The result.
    pub d: [Slot; 4],
    /// The first operand.
    pub a: Box<[Slot]>,
    /// The second.
    pub b: Box<[Slot]>,
    /// What is added to.
    pub c: [Slot; 4],
}

/// What a fragment of `wmma` is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// The first operand.
    A,
    /// The second one.
    B,
    /// What is added to, or the result.
    Sums,
}

/// A copy between global and shared memory that runs beside the warps.
#[derive(Clone, Debug)]
pub struct Bulk {
    /// Where to or, of a store of a box, the tensor map.
    pub to: Address,
    /// Where from or, of a load of a box, the tensor map.
    pub from: Address,
    /// Coordinates of a box.
    pub box_at: Option<Box<[Slot]>>,
    /// Bytes, if it is no box.
    pub bytes: Slot,
    /// The barrier where its bytes count; a store has none.
    pub barrier: Option<Address>,
    /// What a store does to global memory, if it does not replace it.
    pub reduces: Option<(Change, usize)>,
}

/// What an instruction does. `to` is where results go, `at` an address, `members` a mask of lanes.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Op {
    /// A function of registers.
    Alu(Alu, Slot, [Slot; 3]),
    /// A register becomes what another one is.
    Move(Place, Slot),
    /// A comparison, combined with a predicate; the second result is that of its opposite.
    Compare(Compare, u32, Option<u32>, [Slot; 2], Option<(Logic, Predicate)>),
    /// `lop3`: three registers' bits, looked up in a table.
    Lookup(Slot, [Slot; 3], u8),
    /// `a · b + c` of words, of the product the low half or the high one, with a carry that comes in or goes on.
    Carry { to: Slot, from: [Slot; 3], carry: Slot, high: bool, takes: bool, gives: bool },
    /// Logic of predicates.
    Logic(Logic, u32, [Predicate; 2]),
    /// A choice.
    Select(Place, [Slot; 2], Predicate),
    /// Several registers become one.
    Pack(Place, Box<[Slot]>),
    /// One becomes several.
    Unpack(Box<[Option<Slot>]>, Place),
    /// A jump, and where those who jump and those who do not meet again.
    Branch { to: u32, meets: u32 },
    /// The end of a thread.
    Exit,
    /// Nothing.
    Nothing,
    /// A fault.
    Trap,
    /// A read: of so many bytes each, signed or not.
    Load { to: Box<[Option<Place>]>, size: usize, signed: bool, at: Address },
    /// A write.
    Store { from: Box<[Place]>, size: usize, at: Address },
    /// An atomic change of memory.
    Atomic { change: Change, size: usize, to: Option<Box<[Place]>>, at: Address, with: Box<[Slot]>, other: Slot },
    /// A shuffle.
    Shuffle { how: Shuffle, to: Slot, inside: Option<u32>, from: Slot, by: Slot, clamp: Slot, members: Slot },
    /// A vote.
    Vote { vote: Vote, of: Predicate, members: Slot },
    /// Lanes with the same number.
    Match { to: Slot, of: Place, members: Slot },
    /// A sum or the like over lanes.
    Reduce { change: Change, to: Slot, of: Slot, members: Slot },
    /// The lanes that run.
    ActiveMask(Slot),
    /// One lane of those that run.
    Elect { to: Option<Slot>, is: Option<u32>, members: Slot },
    /// Lanes wait for each other.
    WarpBarrier(Slot),
    /// A barrier of the block: its number, its threads, whether to wait.
    Barrier { id: Slot, threads: Option<Slot>, waits: bool },
    /// `mbarrier.init`.
    BarrierInit(Address, Slot),
    /// `mbarrier.inval`.
    BarrierInvalidate(Address),
    /// An arrival of so many, after so many bytes were expected; returns the state before.
    BarrierArrive { at: Address, count: Slot, expects: Option<Slot>, state: Option<Slot> },
    /// `mbarrier.expect_tx`, or `mbarrier.complete_tx`.
    BarrierBytes { at: Address, bytes: Slot, completes: bool },
    /// Whether a phase is over: by its parity, or by a state of it.
    BarrierTest { at: Address, is: u32, phase: Place },
    /// `cp.async`.
    CopyAsync { to: Address, from: Address, size: usize, read: Option<Slot> },
    /// `cp.async.commit_group`.
    CopyCommit,
    /// `cp.async.wait_group`.
    CopyWait(usize),
    /// `cp.async.wait_all`: also for copies of no group.
    CopyWaitAll,
    /// `cp.async.bulk`.
    Bulk(Box<Bulk>),
    /// `cp.async.bulk.commit_group`.
    BulkCommit,
    /// `cp.async.bulk.wait_group`.
    BulkWait(usize),
    /// `fence.proxy.async`, and that after the initialisation of barriers.
    ProxyFence,
    /// `ldmatrix`, transposed or not.
    LoadMatrix { to: Box<[Slot]>, transposed: bool, at: Address },
    /// `stmatrix`, transposed or not.
    StoreMatrix { from: Box<[Slot]>, transposed: bool, at: Address },
    /// `mma.sync`.
    Mma(Box<Mma>),
    /// `wmma.load`: a fragment from lines so many elements apart, which are columns or not.
    LoadFragment { fragment: Fragment, to: Box<[Slot]>, at: Address, stride: Slot, size: usize, columns: bool },
    /// `wmma.store`.
    StoreFragment { from: Box<[Slot]>, at: Address, stride: Slot, columns: bool },
    /// `wmma.mma`: of the first and the last eight columns.
    MmaFragments(Box<[Mma; 2]>),
    /// `wgmma.mma_async`.
    Wgmma(Box<Wgmma>),
    /// `wgmma.fence`.
    WgmmaFence,
    /// `wgmma.commit_group`.
    WgmmaCommit,
    /// `wgmma.wait_group`.
    WgmmaWait(usize),
    /// Lets other warps run.
    Yield,
}

/// An instruction.
#[derive(Clone, Debug)]
pub struct Instruction {
    /// What it does.
    pub op: Op,
    /// Its registers.
    pub operands: Operands,
    /// The lanes it does that in.
    pub guard: Option<Predicate>,
    /// Where it stands in the text.
    pub line: u32,
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Its instructions; the last one is an exit.
    pub code: Vec<Instruction>,
    /// Lines of a warp's registers.
    pub lines: usize,
    /// Predicates.
    pub predicates: usize,
    /// What is in lines from the start: 32 bits, or 64.
    pub constants: Vec<(Slot, u64, bool)>,
    /// What a warp puts in lines.
    pub specials: Vec<(Special, Slot)>,
    /// Sizes of parameters, and where they lie.
    pub parameters: Vec<(usize, usize)>,
    /// Bytes of parameters.
    pub parameter_bytes: usize,
    /// Bytes of shared memory without that of launches, from [`SHARED_START`](super::SHARED_START) on.
    pub shared_bytes: usize,
    /// Bytes of a thread's local memory.
    pub local_bytes: usize,
    /// Whether it has products of warpgroups.
    pub multiplies: bool,
}
