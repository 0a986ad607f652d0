//! Sequence parallelism: attention of one long sequence over several devices.
//!
//! Each device is a *rank* and holds its share of the sequence: `q`, `k` and `v` of `[batch, heads, seq / world_size, head_dim]`. Every rank
//! calls the same function from its own thread, with its share and its [`Collectives`]:
//!
//! | | shares of the sequence | what travels | limit |
//! |---|---|---|---|
//! | [`ulysses_attention`] | [`Sharding::Contiguous`] | shares of `q`, `k`, `v` and the output | ranks divide the heads of keys |
//! | [`ring_attention`] | [`Sharding::Zigzag`] if causal, else any | keys and values, and their gradients | none on the number of ranks |
//!
//! # Gradients
//!
//! Both are differentiable, and their backwards communicate. **Every rank must therefore run its backward at the same time, from its own
//! thread**, and either all ranks track gradients or none. Burn locks a graph while its backward runs, so inputs of different ranks must not
//! derive from the same tracked tensor: give each rank its own copy of the model, as for data parallelism. A backward cannot return an error: it
//! panics with the message of the [`SequenceParallelError`]. Ranks keep their [`Collectives`] until the backward has run.
//!
//! # Example
//!
//! Two ranks on one device:
//!
//! ```
//! # #[cfg(feature = "flex")] {
//! use burn::tensor::{Device, Distribution, Tensor, Tolerance};
//! use burn_flash_attention::sequence_parallel::{Sharding, local_group, ring_attention};
//! use burn_flash_attention::{FlashAttentionOptions, flash_attention};
//! use std::thread;
//! use std::time::Duration;
//!
//! let device = Device::flex();
//! let x = Tensor::<4>::random([1, 4, 64, 16], Distribution::Default, &device);
//! let options = FlashAttentionOptions::new().with_causal(true);
//!
//! let shares = Sharding::Zigzag.shard(x.clone(), 2, 2)?;
//! let outs = thread::scope(|scope| {
//!     let ranks = shares.into_iter().zip(local_group(2, Duration::from_secs(60)));
//!     let ranks: Vec<_> = ranks
//!         .map(|(share, collectives)| {
//!             let options = &options;
//!             scope.spawn(move || {
//!                 let share = Tensor::from_inner(share).require_grad();
//!                 let out = ring_attention(share.clone(), share.clone(), share.clone(), options, &collectives);
//!                 let gradients = out.clone().sum().backward();
//!                 assert_eq!(share.grad(&gradients).unwrap().dims(), [1, 4, 32, 16]);
//!                 out.inner()
//!             })
//!         })
//!         .collect();
//!     ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
//! });
//!
//! let out = Sharding::Zigzag.unshard(outs, 2)?;
//! let whole = flash_attention(x.clone(), x.clone(), x, &options);
//! out.into_data().assert_approx_eq::<f32>(&whole.into_data(), Tolerance::default());
//! # }
//! # Ok::<(), burn_flash_attention::sequence_parallel::SequenceParallelError>(())
//! ```

mod checks;
mod collectives;
mod error;
mod local_group;
mod merge;
mod node;
mod partial;
mod ring;
mod ring_plan;
mod sharding;
mod ulysses;

pub use collectives::Collectives;
pub use error::{CollectiveError, SequenceParallelError};
pub use local_group::local_group;
pub use ring::{ring_attention, try_ring_attention};
pub use ring_plan::{RingStep, Rows, ring_plan};
pub use sharding::Sharding;
pub use ulysses::{try_ulysses_attention, ulysses_attention};
