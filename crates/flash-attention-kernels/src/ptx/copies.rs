//! Loads by the tensor memory accelerator (TMA), and reads and writes of shared and global memory.

use super::asm::{effect, effect_value, effect_values, pointers};
use super::barriers::elected;
use super::wgmma::descriptor;
use cubecl::prelude::*;
use cubecl_core::ir::prelude::Value;
use cubecl_core::ir::{ExpandValue, Scope, read_value};

// -- memory

/// One thread of the warp loads the box of `map` at `(batch, head, row, column)` to a shared address. The bytes are counted at
/// `barrier`. Elements outside the tensor are loaded as zeros. The whole warp must call it.
#[cube]
pub fn tma_load<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    to: u32,
    barrier: u32,
    batch: u32,
    head: u32,
    row: u32,
    column: u32,
) {
    intrinsic!(|scope| {
        let args = vec![
            to.read_value(scope),
            map.value(scope),
            column.read_value(scope),
            row.read_value(scope),
            head.read_value(scope),
            batch.read_value(scope),
            barrier.read_value(scope),
        ];
        let template = "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [$0], \
             [$1, {$2, $3, $4, $5}], [$6];";
        effect(scope, &elected(template), "r,l,r,r,r,r,r,~{memory}", args)
    })
}

/// One thread of the warp loads `bytes` bytes, from element `from` of `source` on, to a shared address. They are counted at
/// `barrier`. Addresses and size are multiples of 16 bytes. The whole warp must call it.
#[cube]
pub fn bulk_load(source: &[u32], from: usize, #[comptime] bytes: usize, to: u32, barrier: u32) {
    let element = &source[from..from + 1];
    bulk_load_from(element, bytes, to, barrier);
}

#[cube]
fn bulk_load_from(element: &[u32], #[comptime] bytes: usize, to: u32, barrier: u32) {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
        let from = unsafe { *element.__expand_as_ptr_method(scope) }.value(scope);
        let args = vec![to.read_value(scope), from, barrier.read_value(scope)];
        let template =
            format!("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [$0], [$1], {bytes}, [$2];");
        effect(scope, &elected(&template), "r,l,r,~{memory}", args)
    })
}

/// One thread of the warp prefetches the box of `map` at `(batch, head, row, column)` to the L2 cache. The whole warp must call
/// it.
#[cube]
pub fn tma_prefetch<E: CubePrimitive>(
    map: &TensorMap<E, Tiled>,
    batch: u32,
    head: u32,
    row: u32,
    #[comptime] column: u32,
) {
    intrinsic!(|scope| {
        let args = vec![map.value(scope), row.read_value(scope), head.read_value(scope), batch.read_value(scope)];
        let template = format!("cp.async.bulk.prefetch.tensor.4d.L2.global.tile [$0, {{{column}, $1, $2, $3}}];");
        effect(scope, &elected(&template), "l,r,r,r,~{memory}", args)
    })
}

/// Writes two words to vector `nth` of `to`, if `live`. The store is predicated, because after a branch the assembler considers
/// the warp divergent. (Indexing would compute an address for each vector: indices are added in 32 bits, which an immediate
/// offset cannot express.)
#[cube]
pub fn store_pair(to: &mut [Vector<u32, Const<2>>], #[comptime] nth: usize, low: u32, high: u32, live: bool) {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
        let to = unsafe { *to.__expand_as_ptr_method(scope) }.value(scope);
        let template = format!("@$3 st.global.v2.u32 [$0+{}], {{$1, $2}};", 8 * nth);
        let args = vec![to, low.read_value(scope), high.read_value(scope), live.read_value(scope)];
        effect(scope, &template, "l,r,r,b,~{memory}", args)
    })
}

/// Writes a word of shared memory.
#[cube]
pub fn store_shared(at: u32, value: u32) {
    intrinsic!(|scope| {
        let args = vec![at.read_value(scope), value.read_value(scope)];
        effect(scope, "st.shared.u32 [$0], $1;", "r,r,~{memory}", args)
    })
}

/// Reads a word of shared memory.
#[cube]
pub fn load_shared(at: u32) -> u32 {
    intrinsic!(|scope| {
        let (ty, at) = (u32::__expand_as_type(scope), at.read_value(scope));
        ExpandValue::from(effect_value(scope, ty, "ld.shared.u32 $0, [$1];", "=r,r,~{memory}", vec![at])).into()
    })
}

/// Reads two f32 of shared memory, `offset` bytes after `at`. The offset is part of the instruction: a sum would be an
/// instruction of its own, because LLVM turns additions to aligned addresses into disjunctions, which no address contains.
#[cube]
pub fn load_shared_pair(at: u32, #[comptime] offset: usize) -> Sequence<f32> {
    intrinsic!(|scope| {
        let (ty, at) = (f32::__expand_as_type(scope), at.read_value(scope));
        let template = format!("ld.shared.v2.f32 {{$0, $1}}, [$2+{offset}];");
        sequence(scope, effect_values(scope, ty, 2, &template, "=f,=f,r,~{memory}", vec![at]))
    })
}

/// Writes the f32 registers `4 nth` to `4 nth + 3` to shared memory, `offset` bytes after `at`.
#[cube]
pub fn store_shared_floats(at: u32, #[comptime] offset: usize, values: &Array<f32>, #[comptime] nth: usize) {
    intrinsic!(|scope| {
        let mut args = vec![at.read_value(scope)];
        args.extend(pointers(scope, values, 4 * nth + 4)[4 * nth..].iter().map(|value| read_value(scope, *value)));
        let template = format!("st.shared.v4.f32 [$0+{offset}], {{$1, $2, $3, $4}};");
        effect(scope, &template, "r,f,f,f,f,~{memory}", args)
    })
}

/// Reads what [`store_shared_floats()`] has written.
#[cube]
pub fn load_shared_floats(at: u32, #[comptime] offset: usize) -> Sequence<f32> {
    intrinsic!(|scope| {
        let (ty, at) = (f32::__expand_as_type(scope), at.read_value(scope));
        let template = format!("ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4+{offset}];");
        sequence(scope, effect_values(scope, ty, 4, &template, "=f,=f,=f,=f,r,~{memory}", vec![at]))
    })
}

/// Reads four f32 of global memory, two vectors from the first of `from` on, which other thread blocks may have written before this warp
/// learned of it.
#[cube]
pub fn load_floats_of_others(from: &[Vector<u32, Const<2>>]) -> Sequence<f32> {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let (ty, template) = (f32::__expand_as_type(scope), "ld.relaxed.gpu.global.v4.f32 {$0, $1, $2, $3}, [$4];");
        sequence(scope, effect_values(scope, ty, 4, template, "=f,=f,=f,=f,l,~{memory}", vec![from]))
    })
}

/// Reads the four words of the first vector of `from`, whatever its elements are.
#[cube]
pub fn load_words<E: CubePrimitive>(from: &[E]) -> Sequence<u32> {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let (ty, template) = (u32::__expand_as_type(scope), "ld.global.v4.u32 {$0, $1, $2, $3}, [$4];");
        sequence(scope, effect_values(scope, ty, 4, template, "=r,=r,=r,=r,l,~{memory}", vec![from]))
    })
}

/// Reads the first word of `from`, like [`load_floats_of_others()`].
#[cube]
pub fn load_word_of_others(from: &[u32]) -> u32 {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
        let from = unsafe { *from.__expand_as_ptr_method(scope) }.value(scope);
        let (ty, template) = (u32::__expand_as_type(scope), "ld.relaxed.gpu.global.u32 $0, [$1];");
        ExpandValue::from(effect_value(scope, ty, template, "=r,l,~{memory}", vec![from])).into()
    })
}

/// Reads four 8 × 8 tiles of 16 bits from shared memory (`ldmatrix`). For tile `n`, thread `8 n + i` gives the address of row
/// `i`, 16 bytes. Thread `u` gets columns `2 (u % 4)` and `2 (u % 4) + 1` of row `u / 4` of each tile, which is the layout of
/// an accumulator. If `transposed`, rows and columns are exchanged.
#[cube]
pub fn load_tiles(at: u32, #[comptime] transposed: bool) -> Sequence<u32> {
    intrinsic!(|scope| {
        let (ty, at) = (u32::__expand_as_type(scope), at.read_value(scope));
        let transposed = if transposed { ".trans" } else { "" };
        let template = format!("ldmatrix.sync.aligned.m8n8.x4{transposed}.shared.b16 {{$0, $1, $2, $3}}, [$4];");
        sequence(scope, effect_values(scope, ty, 4, &template, "=r,=r,=r,=r,r,~{memory}", vec![at]))
    })
}

/// The inverse of [`load_tiles()`]: each thread writes the elements that it would read.
#[cube]
pub fn store_tiles(at: u32, tiles: &Array<u32>) {
    store_tiles_of(at, tiles[0], tiles[1], tiles[2], tiles[3]);
}

#[cube]
fn store_tiles_of(at: u32, a: u32, b: u32, c: u32, d: u32) {
    intrinsic!(|scope| {
        let args = [at, a, b, c, d].map(|x| x.read_value(scope)).to_vec();
        let template = "stmatrix.sync.aligned.m8n8.x4.shared.b16 [$0], {$1, $2, $3, $4};";
        effect(scope, template, "r,r,r,r,r,~{memory}", args)
    })
}

/// Writes 8 × 8 tiles of 16 bits to shared memory with rows and columns exchanged, `offset` bytes after `at`: the inverse of
/// [`load_tiles()`] for four tiles. For two tiles, threads from 16 on give no address.
#[cube]
pub fn store_transposed(at: u32, #[comptime] offset: usize, tiles: &Sequence<u32>) {
    intrinsic!(|scope| {
        let count = tiles.len();
        let mut args = vec![at.read_value(scope)];
        args.extend(tiles.iter_cloned().map(|x| x.read_value(scope)));
        let words: Vec<_> = (1..=count).map(|nth| format!("${nth}")).collect();
        let words = words.join(", ");
        let template = format!("stmatrix.sync.aligned.m8n8.x{count}.trans.shared.b16 [$0+{offset}], {{{words}}};");
        let constraints = format!("{}~{{memory}}", "r,".repeat(count + 1));
        effect(scope, &template, &constraints, args)
    })
}

/// Reads four words of shared memory.
#[cube]
pub fn load_shared_quad(at: u32) -> Sequence<u32> {
    intrinsic!(|scope| {
        let (ty, at) = (u32::__expand_as_type(scope), at.read_value(scope));
        let template = "ld.shared.v4.u32 {$0, $1, $2, $3}, [$4];";
        sequence(scope, effect_values(scope, ty, 4, template, "=r,=r,=r,=r,r,~{memory}", vec![at]))
    })
}

/// Writes four words to the first two vectors of `to`, which starts at a multiple of 16 bytes, if `live`. Predicated, like
/// [`store_pair()`].
#[cube]
pub fn store_quad(to: &mut [Vector<u32, Const<2>>], words: &Sequence<u32>, live: bool) {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
        let mut args = vec![unsafe { *to.__expand_as_ptr_method(scope) }.value(scope)];
        args.extend(words.iter_cloned().map(|x| x.read_value(scope)));
        args.push(live.read_value(scope));
        effect(scope, "@$5 st.global.v4.u32 [$0], {$1, $2, $3, $4};", "l,r,r,r,r,b,~{memory}", args)
    })
}

/// Atomically adds registers `4 nth` to `4 nth + 3` to vector `32 nth` of `sums`.
#[cube]
pub fn add_quad(sums: &[Vector<f32, Const<4>>], values: &Array<f32>, #[comptime] nth: usize) {
    intrinsic!(|scope| {
        let template = format!("red.global.add.v4.f32 [$0+{}], {{$1, $2, $3, $4}};", 512 * nth);
        effect(scope, &template, "l,f,f,f,f,~{memory}", quad(scope, &sums, values, nth))
    })
}

/// [`add_quad()`], or a write if `first`. Both are predicated, like the writes of [`store_pair()`].
#[cube]
pub fn write_or_add_quad(sums: &[Vector<f32, Const<4>>], values: &Array<f32>, #[comptime] nth: usize, first: bool) {
    intrinsic!(|scope| {
        let to = format!("[$0+{}], {{$1, $2, $3, $4}};", 512 * nth);
        let template = format!("@$5 st.global.v4.f32 {to}\n@!$5 red.global.add.v4.f32 {to}");
        let mut args = quad(scope, &sums, values, nth);
        args.push(first.read_value(scope));
        effect(scope, &template, "l,f,f,f,f,b,~{memory}", args)
    })
}

/// The address of `sums` and the values of registers `4 nth` to `4 nth + 3`.
fn quad(
    scope: &Scope,
    sums: &NativeExpand<[Vector<f32, Const<4>>]>,
    values: &NativeExpand<Array<f32>>,
    nth: usize,
) -> Vec<Value> {
    // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
    let sums = unsafe { *sums.__expand_as_ptr_method(scope) }.value(scope);
    let registers = pointers(scope, values, 4 * nth + 4);
    std::iter::once(sums).chain(registers[4 * nth..].iter().map(|register| read_value(scope, *register))).collect()
}

/// The address of the start of `tile`, a multiple of 16, in the shared window. The low bits of a descriptor hold it in units of
/// 16 bytes.
#[cube]
pub fn shared_address<E: CubePrimitive>(tile: &[E]) -> u32 {
    u32::cast_from(descriptor::<E>(tile, 16usize, 1024usize) & 0x3FFFu64) << 4
}

/// Writes one of the two numbers of a packed register to the first element of `to`, if `live`. Predicated, like
/// [`store_pair()`].
#[cube]
pub fn store_half<E: CubePrimitive>(to: &mut [E], packed: u32, #[comptime] high: bool, live: bool) {
    intrinsic!(|scope| {
        // SAFETY: the reference belongs to a kernel that is being expanded. Its pointer is a value in the kernel's code and is not dereferenced here.
        let to = unsafe { *to.__expand_as_ptr_method(scope) }.value(scope);
        let halves = if high { "_, half" } else { "half, _" };
        let template = format!("{{\n.reg .b16 half;\nmov.b32 {{{halves}}}, $1;\n@$2 st.global.b16 [$0], half;\n}}");
        effect(scope, &template, "l,r,b,~{memory}", vec![to, packed.read_value(scope), live.read_value(scope)])
    })
}

/// Converts values to the result of a `#[cube]` function.
fn sequence<T: CubePrimitive>(scope: &Scope, values: Vec<Value>) -> SequenceExpand<T> {
    let mut all = Sequence::<T>::__expand_new(scope);
    values.into_iter().for_each(|value| all.__expand_push_method(scope, ExpandValue::from(value).into()));
    all
}
