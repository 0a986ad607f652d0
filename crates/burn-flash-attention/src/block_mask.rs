//! Block masks: which blocks of queries and keys see each other.

use burn::tensor::{DType, Device, Int, IntDType, Tensor, TensorData};
use flash_attention_kernels::BlockLists;
use flash_attention_kernels::blocks::{EMPTY, FULL, PARTIAL};

/// State of a block of queries and keys.
///
/// ```
/// use burn_flash_attention::BlockState;
///
/// // Causality, for blocks of as many queries as keys.
/// let state = |q_block: usize, k_block: usize| match q_block.cmp(&k_block) {
///     std::cmp::Ordering::Less => BlockState::Empty,
///     std::cmp::Ordering::Equal => BlockState::Partial,
///     std::cmp::Ordering::Greater => BlockState::Full,
/// };
/// assert_eq!(state(3, 4), BlockState::Empty);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// Hidden, whatever the mask and `mask_mod` say. The block costs no time.
    Empty,
    /// Mask and `mask_mod` are evaluated for each pair.
    Partial,
    /// Visible, whatever the mask and `mask_mod` say. They are not evaluated.
    Full,
}

impl BlockState {
    /// Number that represents this state in [`BlockMask::states`].
    ///
    /// ```
    /// use burn_flash_attention::BlockState;
    ///
    /// assert_eq!([BlockState::Empty, BlockState::Partial, BlockState::Full].map(BlockState::number), [0, 1, 2]);
    /// ```
    pub fn number(self) -> i32 {
        let number = match self {
            BlockState::Empty => EMPTY,
            BlockState::Partial => PARTIAL,
            BlockState::Full => FULL,
        };
        number as i32
    }
}

/// State of each block of queries and keys: whether it is hidden, visible, or needs the mask and `mask_mod` evaluated. Only blocks that are
/// not hidden cost time (FlexAttention, arXiv:2412.05496, section 4.2; block-sparse FlashAttention, arXiv:2205.14135, section 3.3).
///
/// Query `i` and key `j`, counted from the beginning of their sequence, belong to the block `(i / block_q, j / block_k)`. Causality, windows
/// and sequence lengths hide pairs in every block. Bias, slopes, score functions, sinks and dropout are not affected. Each packed sequence has
/// states of its own; a bias, slopes and score tensors cannot be combined with these. A block mask has no gradient.
///
/// Kernels iterate over lists of the blocks that they visit. The first call with a block mask builds these lists for its tiles, causality
/// and window. Later calls, in any layer or step, reuse them from the block mask and its clones. Create the mask once if it does not
/// change.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Distribution, Tensor};
/// use burn_flash_attention::mods::{MaskFn, SlidingGlobal};
/// use burn_flash_attention::{BlockMask, FlashAttentionOptions, flash_attention};
///
/// // 64 keys to each side, and the first 4 for all.
/// let device = Device::flex();
/// let number = |x: f32| Tensor::<4>::full([1, 1, 1, 1], x, &device);
/// let options = FlashAttentionOptions::new().with_mask_mod(MaskFn::of::<SlidingGlobal>(), [number(64.0), number(4.0)]);
/// let blocks = BlockMask::of(&options, [1, 1], [1024, 1024], [128, 128], &device);
///
/// let x = Tensor::<4>::random([1, 2, 1024, 16], Distribution::Default, &device);
/// let sparse = options.clone().with_block_mask(blocks);
/// let out = flash_attention(x.clone(), x.clone(), x.clone(), &sparse);
/// // The same, for less.
/// out.into_data().assert_eq(&flash_attention(x.clone(), x.clone(), x, &options).into_data(), true);
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct BlockMask {
    /// `[batch | 1, num_heads_q | 1, seq_q / block_q, seq_k / block_k]`, the last two rounded up: 0 for [empty](BlockState::Empty) blocks,
    /// 1 for [partial](BlockState::Partial) blocks, and any other number for [full](BlockState::Full) blocks. With packed sequences
    /// `[sequences | 1, num_heads_q | 1, n_q, n_k]`, where `n_q` and `n_k` are at most the same, and pairs past the last block are hidden.
    pub states: Tensor<4, Int>,
    /// Queries in a block: a multiple of 128.
    pub block_q: usize,
    /// Keys in a block: a multiple of 128.
    pub block_k: usize,
    /// Lists that calls have built from the states, for later calls. Clones share them.
    pub(crate) lists: BlockLists,
}

impl BlockMask {
    /// Creates a block mask from states on a device: `[batch | 1, num_heads_q | 1, seq_q / block_q, seq_k / block_k]`, the last two rounded
    /// up. The numbers are those of [`BlockState::number`]; any other number means full. States are not validated: reading them would
    /// synchronise the device. Shape and block sizes are checked where the mask is used.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Int, Tensor};
    /// use burn_flash_attention::BlockMask;
    ///
    /// // 256 queries and 300 keys, of which the last 44 are for the second half of the queries.
    /// let states = Tensor::<4, Int>::from_data([[[[2, 2, 0], [2, 2, 2]]]], &Device::flex());
    /// assert_eq!(BlockMask::new(states, 128, 128).states.dims(), [1, 1, 2, 3]);
    /// # }
    /// ```
    pub fn new(states: Tensor<4, Int>, block_q: usize, block_k: usize) -> Self {
        // Kernels read i32. Casting here, and not in every call, lets all calls share the lists built from this tensor.
        BlockMask { states: states.cast(IntDType::I32), block_q, block_k, lists: BlockLists::default() }
    }

    /// Creates a block mask on the host. `shape` is the shape of the states, and `state` returns the state for a batch, head, block of
    /// queries and block of keys.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::Device;
    /// use burn_flash_attention::{BlockMask, BlockState};
    ///
    /// // BigBird's blocks without its random ones (arXiv:2007.14062): neighbours, and the first block for all.
    /// let state = |_, _, q: usize, k: usize| match q.abs_diff(k) <= 1 || q == 0 || k == 0 {
    ///     true => BlockState::Full,
    ///     false => BlockState::Empty,
    /// };
    /// let blocks = BlockMask::from_blocks([1, 1, 8, 8], 128, 128, &Device::flex(), state);
    /// assert_eq!(blocks.states.sum().into_scalar::<i32>(), 2 * (22 + 2 * 6));
    /// # }
    /// ```
    pub fn from_blocks(
        shape: [usize; 4],
        block_q: usize,
        block_k: usize,
        device: &Device,
        state: impl Fn(usize, usize, usize, usize) -> BlockState,
    ) -> Self {
        let [_, heads, of_q, of_k] = shape;
        let at = |n: usize| state(n / of_k / of_q / heads, n / of_k / of_q % heads, n / of_k % of_q, n % of_k);
        let states: Vec<i32> = (0..shape.iter().product()).map(|n| at(n).number()).collect();
        let states = Tensor::from_data(TensorData::new(states, shape), (device, DType::I32));
        BlockMask::new(states, block_q, block_k)
    }
}

#[cfg(all(test, feature = "wgpu"))]
mod tests {
    use super::{BlockMask, BlockState};
    use crate::{FlashAttentionOptions, flash_attention};
    use burn::tensor::{Device, DeviceType, Distribution, Tensor};

    /// Calls share the lists of a block mask, also through fusion and autodiff.
    #[test]
    fn calls_share_what_they_make_of_a_mask() {
        let Some(device) = Device::enumerate(DeviceType::Wgpu).into_vec().into_iter().next() else { return };
        let device = device.autodiff();
        let state = |_, _, q: usize, k: usize| if k <= q { BlockState::Full } else { BlockState::Empty };
        let blocks = BlockMask::from_blocks([1, 1, 2, 2], 128, 128, &device, state);
        let layer = |options: FlashAttentionOptions| {
            let options = options.with_block_mask(blocks.clone());
            let x = Tensor::<4>::random([1, 1, 256, 16], Distribution::Default, &device).require_grad();
            let loss = flash_attention(x.clone(), x.clone(), x.clone(), &options).sum();
            x.grad(&loss.backward()).unwrap().into_data();
            // A software Vulkan driver crashes if it still has work when the process ends.
            loss.into_data();
            device.sync().unwrap();
            blocks.lists.kept()
        };
        let options = FlashAttentionOptions::new();
        let made = layer(options.clone());
        assert!(made >= 2, "there must be lists of queries and of keys, but {made} were made");
        assert_eq!(layer(options.clone()), made);
        assert!(layer(options.with_window_left(100)) > made, "a window must have its own lists");
    }
}
