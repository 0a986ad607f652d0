//! An executable kernel. Registers and constants are lines of the register file, and labels are instruction numbers.

use super::lanes::{Alu, Compare};
use super::operands::Operands;

/// Marks the absence of an instruction number.
pub const NOWHERE: u32 = u32::MAX;

/// A line of the register file.
pub type Slot = u32;

/// A value that a warp computes when it starts.
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
    /// `%lanemask_…`: the lanes with this order relative to the own lane, and whether equality is included.
    LaneMask(std::cmp::Ordering, bool),
    /// `%dynamic_smem_size`.
    DynamicShared,
    /// Address of the parameters plus an offset. 64 bits.
    Parameter(usize),
    /// A constant.
    Constant(u32),
}

/// State space of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Space {
    /// Generic.
    Generic,
    /// Global memory, shared by the device.
    Global,
    /// Shared memory of the block.
    Shared,
    /// Local memory of the thread.
    Local,
    /// Parameters of the kernel.
    Parameter,
}

/// An address for each lane.
#[derive(Clone, Copy, Debug)]
pub struct Address {
    /// State space.
    pub space: Space,
    /// Register with the base address.
    pub base: Option<Slot>,
    /// Whether the base takes 64 bits.
    pub wide: bool,
    /// Offset in bytes.
    pub offset: i64,
}

/// A register of 32 or 64 bits.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    /// First line.
    pub slot: Slot,
    /// Whether it takes 64 bits.
    pub wide: bool,
}

/// A predicate as an operand.
#[derive(Clone, Copy, Debug)]
pub struct Predicate {
    /// Number of the predicate; number 0 is always false.
    pub index: u32,
    /// Mask that its lanes are XORed with.
    pub flip: u32,
}

/// Logical operation on predicates.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Logic {
    /// Conjunction.
    And,
    /// Disjunction.
    Or,
    /// Exclusive or.
    Xor,
}

/// Source lane of a shuffle.
#[derive(Clone, Copy, Debug)]
pub enum Shuffle {
    /// A lower lane.
    Up,
    /// A higher lane.
    Down,
    /// The lane with some bits flipped.
    Butterfly,
    /// The lane of this number.
    Index,
}

/// Result of a vote.
#[derive(Clone, Copy, Debug)]
pub enum Vote {
    /// Whether the predicate holds in all lanes.
    All(u32),
    /// Whether the predicate holds in any lane.
    Any(u32),
    /// Whether the predicate is the same in all lanes.
    Uniform(u32),
    /// Mask of the lanes in which the predicate holds.
    Ballot(Slot),
}

/// Operation of an atomic instruction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Change {
    /// `add` of integers.
    Add,
    /// `add` of f32.
    AddF32,
    /// `add` of f64.
    AddF64,
    /// `add` of two packed f16.
    AddF16x2,
    /// `add` of two packed bf16.
    AddBf16x2,
    /// `add` of one f16.
    AddF16,
    /// `add` of one bf16.
    AddBf16,
    /// `min`; whether the integers are signed.
    Min(bool),
    /// `max`; whether the integers are signed.
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

/// Element type of a product's operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Element {
    /// f16.
    F16,
    /// bf16.
    Bf16,
    /// tf32.
    Tf32,
}

/// Location of the first operand of a warpgroup's product.
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
    /// Element type of the operands.
    pub element: Element,
    /// Number of columns.
    pub columns: usize,
    /// The accumulator.
    pub sums: Box<[Slot]>,
    /// The first operand.
    pub a: Left,
    /// Descriptor of the second operand.
    pub b: Slot,
    /// Whether the second operand is MN-major.
    pub b_transposed: bool,
    /// Whether the product is added to the accumulator's contents.
    pub adds: Predicate,
    /// Whether each operand is negated.
    pub negated: [bool; 2],
}

/// A product of a warp.
#[derive(Clone, Debug)]
pub struct Mma {
    /// Element type of the operands.
    pub element: Element,
    /// Depth: 4, 8 or 16.
    pub depth: usize,
    /// The result.
    pub d: [Slot; 4],
    /// The first operand.
    pub a: Box<[Slot]>,
    /// The second operand.
    pub b: Box<[Slot]>,
    /// The accumulator that the product is added to.
    pub c: [Slot; 4],
}

/// Role of a fragment of `wmma`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fragment {
    /// The first operand.
    A,
    /// The second operand.
    B,
    /// The accumulator or the result.
    Sums,
}

/// An asynchronous copy between global and shared memory.
#[derive(Clone, Debug)]
pub struct Bulk {
    /// Destination, or the tensor map if a box is stored.
    pub to: Address,
    /// Source, or the tensor map if a box is loaded.
    pub from: Address,
    /// Coordinates of the box.
    pub box_at: Option<Box<[Slot]>>,
    /// Number of bytes, if no box is copied.
    pub bytes: Slot,
    /// The barrier that counts the bytes; `None` for a store.
    pub barrier: Option<Address>,
    /// Reduction that a store applies to global memory, and the size of an element; `None` if it overwrites.
    pub reduces: Option<(Change, usize)>,
}

/// Operation of an instruction. `to` is the destination, `at` an address, `members` a mask of lanes.
#[derive(Clone, Debug)]
#[allow(missing_docs)]
pub enum Op {
    /// A function of registers.
    Alu(Alu, Slot, [Slot; 3]),
    /// Copies a register.
    Move(Place, Slot),
    /// A comparison, optionally combined with a predicate. The second destination gets the negated result.
    Compare(Compare, u32, Option<u32>, [Slot; 2], Option<(Logic, Predicate)>),
    /// `lop3`: bitwise lookup of three registers in a table.
    Lookup(Slot, [Slot; 3], u8),
    /// `a · b + c` of words, with the low or high half of the product, and a carry in or out.
    Carry { to: Slot, from: [Slot; 3], carry: Slot, high: bool, takes: bool, gives: bool },
    /// Logical operation on predicates.
    Logic(Logic, u32, [Predicate; 2]),
    /// `selp`.
    Select(Place, [Slot; 2], Predicate),
    /// Packs several registers into one.
    Pack(Place, Box<[Slot]>),
    /// Unpacks one register into several.
    Unpack(Box<[Option<Slot>]>, Place),
    /// A jump, and the instruction where diverging lanes reconverge.
    Branch { to: u32, meets: u32 },
    /// The end of a thread.
    Exit,
    /// No operation.
    Nothing,
    /// A fault.
    Trap,
    /// A load of values of `size` bytes, signed or not.
    Load { to: Box<[Option<Place>]>, size: usize, signed: bool, at: Address },
    /// A store of values of `size` bytes.
    Store { from: Box<[Place]>, size: usize, at: Address },
    /// An atomic operation on memory.
    Atomic { change: Change, size: usize, to: Option<Box<[Place]>>, at: Address, with: Box<[Slot]>, other: Slot },
    /// A shuffle.
    Shuffle { how: Shuffle, to: Slot, inside: Option<u32>, from: Slot, by: Slot, clamp: Slot, members: Slot },
    /// A vote.
    Vote { vote: Vote, of: Predicate, members: Slot },
    /// `match`: lanes with the same value.
    Match { to: Slot, of: Place, members: Slot },
    /// `redux`: a reduction over lanes.
    Reduce { change: Change, to: Slot, of: Slot, members: Slot },
    /// `activemask`.
    ActiveMask(Slot),
    /// `elect`: one of the active lanes.
    Elect { to: Option<Slot>, is: Option<u32>, members: Slot },
    /// `bar.warp.sync`.
    WarpBarrier(Slot),
    /// A named barrier: its number, its number of threads, and whether to wait.
    Barrier { id: Slot, threads: Option<Slot>, waits: bool },
    /// `mbarrier.init`.
    BarrierInit(Address, Slot),
    /// `mbarrier.inval`.
    BarrierInvalidate(Address),
    /// An arrival of `count`, after an optional expectation of bytes. Returns the previous state.
    BarrierArrive { at: Address, count: Slot, expects: Option<Slot>, state: Option<Slot> },
    /// `mbarrier.expect_tx`, or `mbarrier.complete_tx`.
    BarrierBytes { at: Address, bytes: Slot, completes: bool },
    /// Whether a phase is complete, given its parity or a state.
    BarrierTest { at: Address, is: u32, phase: Place },
    /// `cp.async`.
    CopyAsync { to: Address, from: Address, size: usize, read: Option<Slot> },
    /// `cp.async.commit_group`.
    CopyCommit,
    /// `cp.async.wait_group`.
    CopyWait(usize),
    /// `cp.async.wait_all`, which also waits for copies of no group.
    CopyWaitAll,
    /// `cp.async.bulk`.
    Bulk(Box<Bulk>),
    /// `cp.async.bulk.commit_group`.
    BulkCommit,
    /// `cp.async.bulk.wait_group`.
    BulkWait(usize),
    /// `fence.proxy.async`, and the fence after the initialisation of mbarriers.
    ProxyFence,
    /// `ldmatrix`, transposed or not.
    LoadMatrix { to: Box<[Slot]>, transposed: bool, at: Address },
    /// `stmatrix`, transposed or not.
    StoreMatrix { from: Box<[Slot]>, transposed: bool, at: Address },
    /// `mma.sync`.
    Mma(Box<Mma>),
    /// `wmma.load`: a fragment from lines `stride` elements apart, which are rows or columns.
    LoadFragment { fragment: Fragment, to: Box<[Slot]>, at: Address, stride: Slot, size: usize, columns: bool },
    /// `wmma.store`.
    StoreFragment { from: Box<[Slot]>, at: Address, stride: Slot, columns: bool },
    /// `wmma.mma`, as products of the first and the last eight columns.
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
    /// Operation.
    pub op: Op,
    /// Registers of the operation.
    pub operands: Operands,
    /// Predicate of the lanes that execute it.
    pub guard: Option<Predicate>,
    /// Line in the PTX text.
    pub line: u32,
}

/// A kernel.
#[derive(Clone, Debug)]
pub struct Program {
    /// Its name.
    pub name: String,
    /// Instructions; the last one is an exit.
    pub code: Vec<Instruction>,
    /// Lines of a warp's register file.
    pub lines: usize,
    /// Number of predicates.
    pub predicates: usize,
    /// Initial values of lines, and whether they take 64 bits.
    pub constants: Vec<(Slot, u64, bool)>,
    /// Values that a warp computes at its start, and their lines.
    pub specials: Vec<(Special, Slot)>,
    /// Offsets and sizes of the parameters.
    pub parameters: Vec<(usize, usize)>,
    /// Bytes of all parameters.
    pub parameter_bytes: usize,
    /// Bytes of static shared memory, from [`SHARED_START`](super::SHARED_START) on.
    pub shared_bytes: usize,
    /// Bytes of local memory of a thread.
    pub local_bytes: usize,
    /// Whether the program contains products of warpgroups.
    pub multiplies: bool,
}
