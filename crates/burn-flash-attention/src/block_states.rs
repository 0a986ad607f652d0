//! Block masks computed from options.

use crate::backend::FlashAttentionOps;
use crate::block_mask::BlockMask;
use crate::checks::{check_device, function_tensors, same_device, unwrapped};
use crate::options::FlashAttentionOptions;
use crate::problem::{dims, slices, with_cu_seqlens};
use crate::tensors::{Extras, Tensors};
use burn::backend::Dispatch;
use burn::tensor::{DType, Device, Int, IntDType, Tensor};
use flash_attention_kernels::{AttentionError, AttentionOptions, AttentionProblem, BlockLists, Dtype};

impl BlockMask {
    /// Computes, on the device, the block mask of the pairs that the options' `mask` and `mask_mod` hide. Each pair is evaluated once. The
    /// result serves forward and backward in every layer for as long as `mask` and `mask_mod` do not change. Causality, windows and
    /// sequence lengths are ignored here, since they hide pairs in any case. With the options' `cu_seqlens`, each packed sequence has states
    /// of its own, whose blocks count from its first query and key.
    ///
    /// `[batch, heads]` are the full sizes, or 1 where the hidden pairs are the same for all batches or heads. Mask and tensors broadcast
    /// to `[batch, heads, seq_q, seq_k]`, and `mask_mod` is called with batches and heads below these sizes.
    ///
    /// # Panics
    ///
    /// With the message of the error that [`try_of`](BlockMask::try_of) returns.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::mods::{MaskFn, PrefixLm};
    /// use burn_flash_attention::{BlockMask, FlashAttentionOptions};
    ///
    /// // Of the first text 200 tokens are a prefix, of the second none.
    /// let device = Device::flex();
    /// let prefixes = Tensor::<1>::from_data([200.0, 0.0], &device).reshape([2, 1, 1, 1]);
    /// let options = FlashAttentionOptions::new().with_mask_mod(MaskFn::of::<PrefixLm>(), [prefixes]);
    /// let blocks = BlockMask::of(&options, [2, 1], [256, 256], [128, 128], &device);
    /// assert_eq!(blocks.states.into_data().try_to_vec::<i32>().unwrap(), [2, 1, 2, 1, 1, 0, 2, 1]);
    /// # }
    /// ```
    #[track_caller]
    pub fn of(
        options: &FlashAttentionOptions,
        [batch, heads]: [usize; 2],
        [seq_q, seq_k]: [usize; 2],
        [block_q, block_k]: [usize; 2],
        device: &Device,
    ) -> Self {
        unwrapped(BlockMask::try_of(options, [batch, heads], [seq_q, seq_k], [block_q, block_k], device))
    }

    /// [`BlockMask::of`] that returns an error instead of panicking. If it returns an error, nothing has run.
    ///
    /// # Errors
    ///
    /// Each [`AttentionError`] names the argument at fault and its value.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_flash_attention::{BlockMask, FlashAttentionOptions};
    ///
    /// let options = FlashAttentionOptions::new();
    /// let error = BlockMask::try_of(&options, [1, 1], [256, 256], [64, 128], &Device::flex()).unwrap_err();
    /// assert!(error.to_string().starts_with("block_q is 64; it must be a multiple of 128"));
    /// # }
    /// ```
    pub fn try_of(
        options: &FlashAttentionOptions,
        [batch, heads]: [usize; 2],
        [seq_q, seq_k]: [usize; 2],
        [block_q, block_k]: [usize; 2],
        device: &Device,
    ) -> Result<Self, AttentionError> {
        let q = [batch, heads, seq_q, 1];
        let kv = [batch, heads, seq_k, 1];
        let hiding = AttentionOptions { mask_mod: options.mask_mod, ..Default::default() };
        let mut problem = AttentionProblem::new(&q, &kv, &kv, Dtype::F32, hiding)?;
        let ends = [("cu_seqlens_q", &options.cu_seqlens_q), ("cu_seqlens_k", &options.cu_seqlens_k)];
        let [ends_q, ends_k] = ends.map(|(_, ends)| ends.as_ref().map(Tensor::dims));
        problem =
            with_cu_seqlens(problem, ends_q.as_ref().map(|dims| &dims[..]), ends_k.as_ref().map(|dims| &dims[..]))?;
        for (argument, ends) in ends {
            ends.as_ref().map_or(Ok(()), |ends| same_device(argument, &ends.device(), device))?;
        }
        let sequences = problem.cu_seqlens.unwrap_or(batch);
        let shape = [sequences, heads, seq_q.div_ceil(block_q.max(1)), seq_k.div_ceil(block_k.max(1))];
        problem = problem.with_block_mask(&shape, block_q, block_k)?;
        if let Some(mask) = &options.mask {
            problem = problem.with_mask(&mask.dims())?;
            same_device("mask", &mask.device(), device)?;
        }
        problem = problem.with_mask_tensors(&slices(&dims(&options.mask_tensors)))?;
        function_tensors(["mask_tensors[0]", "mask_tensors[1]"], &options.mask_tensors, device)?;
        // A block mask has no gradient.
        let device = device.clone().inner();
        check_device(device.as_dispatch())?;
        let nth = |nth: usize| options.mask_tensors.get(nth).cloned().map(|tensor| tensor.inner().into_dispatch());
        let ends_of =
            |ends: &Option<Tensor<1, Int>>| ends.clone().map(|ends| ends.inner().cast(IntDType::I32).into_dispatch());
        let tensors = Tensors {
            mask: options.mask.clone().map(|mask| mask.inner().into_dispatch()),
            mask_a: nth(0),
            mask_b: nth(1),
            cu_seqlens_q: ends_of(&options.cu_seqlens_q),
            cu_seqlens_k: ends_of(&options.cu_seqlens_k),
            ..Tensors::default()
        };
        let extras = Extras::new(tensors, [block_q, block_k], BlockLists::default());
        let empty = Tensor::<4, Int>::empty(shape, (&device, DType::I32)).into_dispatch();
        let states = Dispatch::flash_attention_block_states(empty, extras, problem);
        Ok(BlockMask::new(Tensor::from_dispatch(states), block_q, block_k))
    }
}
