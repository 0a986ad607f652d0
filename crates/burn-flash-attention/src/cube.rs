//! Attention on the tensors of Burn's CubeCL backend: views of them, outputs for them, and the kernels in between.

use crate::backend::{
    AttentionGradients, AttentionOutput, CacheElements, CacheLengths, CacheTensors, CachedAttentionOutput,
    FlashAttentionOps, Lse, Saved, Wanted,
};
use crate::problem::{dtype, problem};
use crate::tensors::{Extras, OptionalInt};
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{BoolStore, DType, Shape};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::untile;
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use flash_attention_kernels::e4m3::page_bytes;
use flash_attention_kernels::mods::TENSORS;
#[cfg(feature = "autotune")]
use flash_attention_kernels::tuning::{backward_tuned as backward, forward_tuned as forward};
use flash_attention_kernels::{
    AttentionError, AttentionOptions, AttentionProblem, CacheAppend, Gradients, Inputs, KvStorage, MaskStorage,
    MaskView, TensorView, append_to_cache, block_states, copy_cache_pages,
};
#[cfg(not(feature = "autotune"))]
use flash_attention_kernels::{backward, forward};

impl FlashAttentionOps for CubeBackend {
    fn flash_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        extras: Extras<Self>,
        options: AttentionOptions,
        _lse: Lse,
    ) -> AttentionOutput<Self> {
        launched(try_forward(q, k, v, extras, options))
    }

    fn flash_attention_backward(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        extras: Extras<Self>,
        saved: Saved<Self>,
        wanted: Wanted,
        options: AttentionOptions,
    ) -> AttentionGradients<Self> {
        launched(try_backward(q, k, v, extras, saved, wanted, options))
    }

    fn flash_attention_with_kvcache(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        cache: CacheTensors<Self>,
        extras: Extras<Self>,
        options: AttentionOptions,
        lengths: CacheLengths,
    ) -> CachedAttentionOutput<Self> {
        launched(try_with_kvcache([q, k, v], cache, extras, options, lengths))
    }

    fn flash_attention_block_states(
        empty: IntTensor<Self>,
        extras: Extras<Self>,
        problem: AttentionProblem,
    ) -> IntTensor<Self> {
        launched(try_block_states(empty, extras, &problem))
    }
}

/// The states of blocks, or why they cannot be found out.
fn try_block_states(
    empty: CubeTensor,
    extras: Extras<CubeBackend>,
    problem: &AttentionProblem,
) -> Result<CubeTensor, AttentionError> {
    let (tensors, ..) = extras.into_tensors();
    let tensors = tensors.map(untile);
    let (client, shape) = (empty.client, empty.meta.shape().clone());
    let states = empty_device_contiguous_dtype(client.clone(), empty.device, shape, empty.dtype);
    // Queries, keys and values are not read.
    let of_states = || view(&states);
    let inputs = Inputs {
        mask: tensors.mask.as_ref().map(mask_view),
        mask_tensors: tensors.mask_tensors().map(|tensor| tensor.map(view)),
        cu_seqlens_q: tensors.cu_seqlens_q.as_ref().map(view),
        cu_seqlens_k: tensors.cu_seqlens_k.as_ref().map(view),
        ..Inputs::new(of_states(), of_states(), of_states())
    };
    block_states(&client, problem, &inputs, &of_states())?;
    Ok(states)
}

/// The forward, or why it cannot be done.
pub fn try_forward(
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    extras: Extras<CubeBackend>,
    options: AttentionOptions,
) -> Result<AttentionOutput<CubeBackend>, AttentionError> {
    forward_of(Call::new(q, k, v, extras, options)?)
}

fn forward_of(call: Call) -> Result<AttentionOutput<CubeBackend>, AttentionError> {
    let out = call.empty(call.problem.o_shape(), call.q.dtype);
    let lse = call.empty(call.problem.lse_shape(), DType::F32);
    forward(&call.q.client, &call.problem, &call.inputs, &view(&out), &view(&lse))?;
    Ok(AttentionOutput { out, lse })
}

/// Appends to the cache and computes the forward over it, or says why that cannot be done. The cache's memory is written whoever else
/// refers to it: `kv_cache` hands it to nobody.
fn try_with_kvcache(
    [q, k, v]: [CubeTensor; 3],
    cache: CacheTensors<CubeBackend>,
    extras: Extras<CubeBackend>,
    options: AttentionOptions,
    CacheLengths { before, after, page_size }: CacheLengths,
) -> Result<CachedAttentionOutput<CubeBackend>, AttentionError> {
    let [k, v] = [k, v].map(untile);
    let [batch, ..]: [usize; 4] = k.meta.shape().dims();
    let dtype = dtype("q", q.dtype)?;
    let (k_cache, v_cache) = (Memory::of(cache.k, &k, page_size), Memory::of(cache.v, &v, page_size));
    let storage = k_cache.storage;
    let table = cache.page_table.into_option();
    if let Some(pairs) = cache.page_copies.into_option() {
        copy_cache_pages(&q.client, dtype, storage, &k_cache.view, &v_cache.view, &view(&pairs))?;
    }
    let (seq_lens, new_lens) = (cache.seq_lens.into_option(), extras.seq_lens_q.clone().into_option());
    let varies = seq_lens.is_some() || new_lens.is_some();
    let lens = || empty_device_contiguous_dtype(q.client.clone(), q.device.clone(), Shape::new([batch]), DType::I32);
    let seq_lens_after = varies.then(lens);
    let append = CacheAppend {
        k: view(&k),
        v: view(&v),
        k_cache: k_cache.view.clone(),
        v_cache: v_cache.view.clone(),
        page_table: table.as_ref().map(view),
        storage,
        start: before,
        seq_lens: seq_lens.as_ref().map(view),
        new_lens: new_lens.as_ref().map(view),
        seq_lens_after: seq_lens_after.as_ref().map(view),
    };
    append_to_cache(&q.client, dtype, &append)?;
    let extras = Extras { seq_lens_k: OptionalInt::from_option(seq_lens_after.clone()), ..extras };
    let used = |view: &TensorView| {
        let [batch, heads, rows, head_dim] = view.shape;
        TensorView { shape: [batch, heads, if table.is_some() { rows } else { after }, head_dim], ..view.clone() }
    };
    let kv = [used(&k_cache.view), used(&v_cache.view)];
    let pages = table.map(|table| Pages { table, storage, seq_k: after });
    let attention = forward_of(Call::over(q, kv, pages, extras, options)?)?;
    let cache = CacheTensors {
        k: CacheElements::new(storage, k_cache.tensor),
        v: CacheElements::new(storage, v_cache.tensor),
        seq_lens: OptionalInt::from_option(seq_lens_after),
        page_table: OptionalInt::None,
        page_copies: OptionalInt::None,
    };
    Ok(CachedAttentionOutput { attention, cache })
}

/// The backward, or why it cannot be done.
pub fn try_backward(
    q: CubeTensor,
    k: CubeTensor,
    v: CubeTensor,
    extras: Extras<CubeBackend>,
    saved: Saved<CubeBackend>,
    wanted: Wanted,
    options: AttentionOptions,
) -> Result<AttentionGradients<CubeBackend>, AttentionError> {
    let call = Call::new(q, k, v, extras, options)?;
    let problem = &call.problem;
    let dq = wanted.dq.then(|| call.empty(problem.q_shape(), call.q.dtype));
    let dk = wanted.dk.then(|| call.empty(problem.k_shape(), call.q.dtype));
    let dv = wanted.dv.then(|| call.empty(problem.v_shape(), call.q.dtype));
    let dbias = problem.bias.filter(|_| wanted.dbias).map(|shape| call.empty(shape, call.q.dtype));
    let dalibi_slopes = problem.alibi_slopes.filter(|_| wanted.dalibi_slopes);
    let dalibi_slopes = dalibi_slopes.map(|shape| call.empty(shape, DType::F32));
    let dsinks = (problem.sinks && wanted.dsinks).then(|| call.empty([problem.num_heads_q], DType::F32));
    let dscore_tensors: [_; TENSORS] = std::array::from_fn(|nth| {
        let shape = problem.score_tensors[nth].filter(|_| wanted.dscore_tensors[nth]);
        shape.map(|shape| call.empty(shape, DType::F32))
    });
    // Gradients come as other operations left them: tiled, strided, or expanded with a stride of 0.
    let saved = flash_attention_kernels::Saved {
        o: view(&untile(saved.out)),
        lse: view(&untile(saved.lse)),
        dout: view(&untile(saved.dout)),
        dlse: saved.dlse.into_option().map(|dlse| view(&untile(dlse))),
    };
    let gradients = Gradients {
        dq: dq.as_ref().map(view),
        dk: dk.as_ref().map(view),
        dv: dv.as_ref().map(view),
        dbias: dbias.as_ref().map(view),
        dalibi_slopes: dalibi_slopes.as_ref().map(view),
        dsinks: dsinks.as_ref().map(view),
        dscore_tensors: dscore_tensors.each_ref().map(|tensor| tensor.as_ref().map(view)),
    };
    backward(&call.q.client, problem, &call.inputs, &saved, &gradients)?;
    let [dscore_a, dscore_b] = dscore_tensors;
    Ok(AttentionGradients {
        dq: dq.into(),
        dk: dk.into(),
        dv: dv.into(),
        dbias: dbias.into(),
        dalibi_slopes: dalibi_slopes.into(),
        dsinks: dsinks.into(),
        dscore_a: dscore_a.into(),
        dscore_b: dscore_b.into(),
    })
}

/// Keys or values in the memory of a cache.
struct Memory {
    storage: KvStorage,
    tensor: CubeTensor,
    /// `[batch, num_heads_kv, capacity, head_dim]`, or `[num_pages, num_heads_kv, page_size, head_dim]`.
    view: TensorView,
}

impl Memory {
    /// The memory that new keys or values like these go to.
    fn of(elements: CacheElements<CubeBackend>, new: &CubeTensor, page_size: usize) -> Self {
        let (storage, tensor): (_, CubeTensor) = elements.into_tensor();
        let view = match storage {
            KvStorage::E4m3 => {
                let [_, heads, _, head_dim]: [usize; 4] = new.meta.shape().dims();
                let bytes = tensor.meta.num_elements() * tensor.dtype.size();
                let num_pages = bytes / (heads * page_bytes(page_size, head_dim));
                TensorView::e4m3_pages(tensor.handle.clone(), [num_pages, heads, page_size, head_dim])
            }
            _ => view(&tensor),
        };
        Memory { storage, tensor, view }
    }
}

/// The pages of keys and values that are in pages.
struct Pages {
    /// `[batch, max_pages]`.
    table: CubeTensor,
    storage: KvStorage,
    /// Length of the longest sequence, or more.
    seq_k: usize,
}

/// The arguments of a call, as the kernels take them.
struct Call {
    q: CubeTensor,
    problem: AttentionProblem,
    inputs: Inputs,
}

impl Call {
    fn new(
        q: CubeTensor,
        k: CubeTensor,
        v: CubeTensor,
        extras: Extras<CubeBackend>,
        options: AttentionOptions,
    ) -> Result<Self, AttentionError> {
        Call::over(q, [k, v].map(|tensor| view(&untile(tensor))), None, extras, options)
    }

    /// A call with these keys and values, which are pools of pages if there are pages.
    fn over(
        q: CubeTensor,
        [k, v]: [TensorView; 2],
        pages: Option<Pages>,
        extras: Extras<CubeBackend>,
        options: AttentionOptions,
    ) -> Result<Self, AttentionError> {
        let q = untile(q);
        let (tensors, block_sizes, block_lists) = extras.into_tensors();
        let tensors = tensors.map(untile);
        let shapes = tensors.each_ref().map(|tensor| tensor.meta.shape().to_vec());
        let of_q: [usize; 4] = q.meta.shape().dims();
        let [of_k, of_v] = [k.shape, v.shape].map(|[batch, heads, rows, head_dim]| match &pages {
            Some(pages) => [of_q[0], heads, pages.seq_k, head_dim],
            None => [batch, heads, rows, head_dim],
        });
        let mut problem = problem([&of_q, &of_k, &of_v], &shapes, block_sizes, dtype("q", q.dtype)?, options)?;
        if let Some(pages) = &pages {
            let [num_pages, _, page_size, _] = k.shape;
            problem = problem.with_page_table(pages.table.meta.shape(), num_pages, page_size)?;
            problem = problem.with_kv_storage(pages.storage)?;
        }
        let inputs = Inputs {
            mask: tensors.mask.as_ref().map(mask_view),
            bias: tensors.bias.as_ref().map(view),
            alibi_slopes: tensors.alibi_slopes.as_ref().map(view),
            sinks: tensors.sinks.as_ref().map(view),
            dropout_seed: tensors.dropout_seed.as_ref().map(view),
            seq_lens_q: tensors.seq_lens_q.as_ref().map(view),
            seq_lens_k: tensors.seq_lens_k.as_ref().map(view),
            cu_seqlens_q: tensors.cu_seqlens_q.as_ref().map(view),
            cu_seqlens_k: tensors.cu_seqlens_k.as_ref().map(view),
            score_tensors: tensors.score_tensors().map(|tensor| tensor.map(view)),
            mask_tensors: tensors.mask_tensors().map(|tensor| tensor.map(view)),
            block_mask: tensors.block_mask.as_ref().map(view),
            page_table: pages.as_ref().map(|pages| view(&pages.table)),
            block_lists,
            ..Inputs::new(view(&q), k, v)
        };
        Ok(Call { q, problem, inputs })
    }

    /// An output, without the padded rows that some devices give to plain allocations.
    fn empty<const RANK: usize>(&self, shape: [usize; RANK], dtype: DType) -> CubeTensor {
        empty_device_contiguous_dtype(self.q.client.clone(), self.q.device.clone(), Shape::new(shape), dtype)
    }
}

/// A tensor as kernels take it.
pub fn view<const RANK: usize>(tensor: &CubeTensor) -> TensorView<RANK> {
    TensorView {
        handle: tensor.handle.clone(),
        shape: tensor.meta.shape().dims(),
        strides: std::array::from_fn(|dim| tensor.meta.strides()[dim]),
    }
}

fn mask_view(mask: &CubeTensor) -> MaskView {
    let storage = match mask.dtype {
        DType::Bool(BoolStore::U32) => MaskStorage::U32,
        _ => MaskStorage::U8,
    };
    MaskView { tensor: view(mask), storage }
}

/// `api` has checked all that can be wrong; what only a launch can find out has nobody left to return to, since Burn's
/// fusion may run it long after the call.
pub fn launched<T>(result: Result<T, AttentionError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
