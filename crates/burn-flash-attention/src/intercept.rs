//! Interception of Burn's own attention in its fusion layer: callers of `burn::tensor::module::attention` run these kernels without
//! changing their code.
//!
//! ```text
//! module::attention ─ fusion ─┬─ any other operation ── Burn
//!                             └─ attention, its backward ── run ─┬─ these kernels
//!                                                                └─ Burn: turned off, or what they cannot do
//! ```
//!
//! Burn caches which optimization it found for a sequence of operations. The attention operation is therefore always claimed, and whether
//! these kernels or Burn's own code run it is decided at run time.

use crate::backend::{Saved, Wanted};
use crate::cube::{try_backward, try_forward};
use crate::options::FlashAttentionOptions;
use crate::tensors::{Extras, OptionalFloat, Tensors};
use burn::backend::fusion::stream::Context;
use burn::backend::fusion::{FuserProperties, FuserStatus, OperationFuser};
use burn::backend::ir::{
    AttentionBackwardOpIr, AttentionOpIr, AttentionOptionsIr, AttentionWithLogsumexpOpIr, ModuleOperationIr,
    OperationIr, TensorIr, TensorStatus,
};
use burn::backend::tensor::FloatTensor;
use burn::tensor::ops::AttentionModuleOptions;
use burn_cubecl::fusion::{
    CubeFuser, CubeFusionHandle, CubeOptimization, FallbackOperation, FusedOperation, OptimizationProvider,
    RegistryError, register,
};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use flash_attention_kernels::{AttentionError, AttentionOptions, BlockLists};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// Makes calls of Burn's own `burn::tensor::module::attention` on CubeCL devices, and their backwards, run these kernels until the returned
/// guard is dropped. Call it at the start of the program: Burn accepts no further optimizations once its fusion has started.
///
/// Only attention that Burn runs as one operation can be intercepted: any forward without gradients; with gradients, attention without a
/// mask, a bias or a softcap. Burn splits all other attention into matrix products and a softmax before it reaches the fusion, in memory
/// quadratic in the sequence. Call [`flash_attention`](crate::flash_attention) for those.
///
/// # Errors
///
/// An [`InstallError`] if Burn's fusion has already started.
///
/// ```no_run
/// use burn::tensor::{Device, Tensor, module, ops::AttentionModuleOptions};
///
/// let caught = burn_flash_attention::install()?;
/// let q = Tensor::<4>::zeros([1, 8, 1024, 64], &Device::default());
/// let out = module::attention(q.clone(), q.clone(), q, None, None, AttentionModuleOptions::default());
/// out.into_data();
/// assert_eq!(caught.counts().forward, 1);
/// # Ok::<(), burn_flash_attention::InstallError>(())
/// ```
pub fn install() -> Result<Interception, InstallError> {
    let mut state = state();
    if !state.registered {
        register(Provider).map_err(|error| match error {
            RegistryError::ServiceRunning => InstallError::FusionRunning,
            RegistryError::DuplicateOptimization { name } => InstallError::Duplicate { name },
        })?;
        state.registered = true;
    }
    state.guards += 1;
    Ok(Interception(()))
}

/// Why Burn's attention cannot be intercepted.
///
/// ```
/// assert!(burn_flash_attention::InstallError::FusionRunning.to_string().contains("before the first"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum InstallError {
    /// Burn's fusion has already started.
    #[error("Burn's fusion has already started; call install() before the first operation on a tensor")]
    FusionRunning,
    /// Another optimization is registered under this name.
    #[error("Burn has another optimization named {name}; call install() without registering one of this name")]
    Duplicate {
        /// Name of the optimization.
        name: String,
    },
}

/// Guard that keeps Burn's attention intercepted while it lives.
///
/// ```no_run
/// let caught = burn_flash_attention::install()?;
/// // … train or infer …
/// println!("{:?}", caught.counts());
/// drop(caught); // Burn's attention is its own again.
/// # Ok::<(), burn_flash_attention::InstallError>(())
/// ```
#[derive(Debug)]
#[must_use = "Burn's attention is replaced only while this guard lives"]
pub struct Interception(());

impl Interception {
    /// Numbers of operations intercepted and left to Burn, in this process so far. Operations are counted when they run, which fusion
    /// delays until their results are needed.
    ///
    /// ```no_run
    /// let caught = burn_flash_attention::install()?;
    /// for (why, times) in caught.counts().left {
    ///     println!("{times} times left to Burn: {why}");
    /// }
    /// # Ok::<(), burn_flash_attention::InstallError>(())
    /// ```
    pub fn counts(&self) -> Counts {
        state().counts.clone()
    }
}

impl Drop for Interception {
    fn drop(&mut self) {
        state().guards -= 1;
    }
}

/// Numbers of Burn's attention operations by what ran them.
///
/// ```
/// let counts = burn_flash_attention::Counts::default();
/// assert_eq!((counts.forward, counts.backward, counts.left.len()), (0, 0, 0));
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Counts {
    /// Forwards that ran these kernels.
    pub forward: u64,
    /// Backwards that ran these kernels.
    pub backward: u64,
    /// Number of operations left to Burn, for each reason.
    pub left: BTreeMap<String, u64>,
}

/// State of the whole process, because Burn's registry is global.
struct State {
    registered: bool,
    guards: usize,
    counts: Counts,
}

static STATE: Mutex<State> = Mutex::new(State {
    registered: false,
    guards: 0,
    counts: Counts { forward: 0, backward: 0, left: BTreeMap::new() },
});

fn state() -> MutexGuard<'static, State> {
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

struct Provider;

impl OptimizationProvider for Provider {
    type Operation = Caught;

    fn fuser(&self, _device: &CubeDevice) -> CubeFuser {
        CubeFuser::new(Fuser::default())
    }
}

/// An attention operation of Burn. Its tensors are named relative to the sequence of operations that contains it.
#[derive(Clone, Debug, Serialize, Deserialize)]
enum Operation {
    Forward(AttentionOpIr),
    ForwardWithLse(AttentionWithLogsumexpOpIr),
    Backward(Box<AttentionBackwardOpIr>),
}

impl Operation {
    fn of(operation: &OperationIr) -> Option<Self> {
        match operation {
            OperationIr::Module(ModuleOperationIr::Attention(of)) => Some(Operation::Forward(of.clone())),
            OperationIr::Module(ModuleOperationIr::AttentionWithLogsumexp(of)) => {
                Some(Operation::ForwardWithLse(of.clone()))
            }
            OperationIr::Module(ModuleOperationIr::AttentionBackward(of)) => Some(Operation::Backward(of.clone())),
            _ => None,
        }
    }

    fn inputs(&self) -> Vec<&TensorIr> {
        match self {
            Operation::Forward(of) => {
                [&of.query, &of.key, &of.value].into_iter().chain(&of.mask).chain(&of.attn_bias).collect()
            }
            Operation::ForwardWithLse(of) => vec![&of.query, &of.key, &of.value],
            Operation::Backward(of) => vec![&of.query, &of.key, &of.value, &of.out, &of.logsumexp, &of.out_grad],
        }
    }

    /// Computes the result of Burn's operation. Changes nothing if it returns an error.
    fn run(&self, context: &mut Context<CubeFusionHandle>) -> Result<(), AttentionError> {
        let outputs = match self {
            Operation::Forward(of) => {
                let mask = of.mask.as_ref().map(|mask| {
                    let mask = read_only(context, mask);
                    context.handles.get_bool_tensor::<CubeBackend>(&mask)
                });
                let bias = of.attn_bias.as_ref().map(|bias| float(context, bias));
                let [q, k, v] = [&of.query, &of.key, &of.value].map(|input| float(context, input));
                let output =
                    try_forward(q, k, v, extras(Tensors { mask, bias, ..Tensors::default() }), options(&of.options))?;
                vec![(&of.out, output.out)]
            }
            Operation::ForwardWithLse(of) => {
                let [q, k, v] = [&of.query, &of.key, &of.value].map(|input| float(context, input));
                let output = try_forward(q, k, v, extras(Tensors::default()), options(&of.options))?;
                vec![(&of.out, output.out), (&of.logsumexp, output.lse)]
            }
            Operation::Backward(of) => {
                let [q, k, v] = [&of.query, &of.key, &of.value].map(|input| float(context, input));
                let [out, lse, dout] = [&of.out, &of.logsumexp, &of.out_grad].map(|input| float(context, input));
                let saved = Saved { out, lse, dout, dlse: OptionalFloat::None };
                let options = options(&of.options);
                let gradients = try_backward(q, k, v, extras(Tensors::default()), saved, Wanted::QKV, options)?;
                let all =
                    [(&of.query_grad, gradients.dq), (&of.key_grad, gradients.dk), (&of.value_grad, gradients.dv)];
                all.into_iter().filter_map(|(name, tensor)| Some((name, tensor.into_option()?))).collect()
            }
        };
        // Release inputs that this operation reads last, each once even if it is passed several times.
        let mut gone = HashSet::new();
        for input in self.inputs() {
            let input = context.tensors[&input.id].clone();
            if input.status == TensorStatus::ReadWrite && gone.insert(input.id) {
                drop(context.handles.get_tensor_handle(&input));
            }
        }
        for (name, tensor) in outputs {
            let id = context.tensors[&name.id].id;
            context.handles.register_float_tensor::<CubeBackend>(&id, tensor);
        }
        Ok(())
    }
}

/// The tensor of this name, marked as read-only so that its handle stays registered.
fn read_only(context: &Context<CubeFusionHandle>, name: &TensorIr) -> TensorIr {
    TensorIr { status: TensorStatus::ReadOnly, ..context.tensors[&name.id].clone() }
}

fn float(context: &mut Context<CubeFusionHandle>, name: &TensorIr) -> FloatTensor<CubeBackend> {
    let tensor = read_only(context, name);
    context.handles.get_float_tensor::<CubeBackend>(&tensor)
}

/// Extras of these tensors alone: Burn's attention has no others.
fn extras(tensors: Tensors<CubeTensor>) -> Extras<CubeBackend> {
    Extras::new(tensors, [0; 2], BlockLists::default())
}

fn options(options: &AttentionOptionsIr) -> AttentionOptions {
    FlashAttentionOptions::from(AttentionModuleOptions::from(options.clone())).numbers()
}

/// Finds attention among Burn's operations: at the beginning of a sequence, or after one other operation. Burn does not separate an
/// operation that is not fused from the operation after it.
#[derive(Clone, Default)]
struct Fuser {
    found: Option<Operation>,
    leading: bool,
    closed: bool,
}

impl OperationFuser<CubeOptimization> for Fuser {
    fn fuse(&mut self, operation: &OperationIr) {
        if self.closed {
            return;
        }
        self.found = Operation::of(operation);
        self.closed = self.found.is_some() || self.leading;
        self.leading |= self.found.is_none();
    }

    fn finish(&mut self) -> CubeOptimization {
        let operation = self.found.clone().expect("only an operation that was found is finished");
        CubeOptimization::new(Caught { operation, leading: self.leading })
    }

    fn reset(&mut self) {
        *self = Self::default();
    }

    fn status(&self) -> FuserStatus {
        if self.closed { FuserStatus::Closed } else { FuserStatus::Open }
    }

    fn properties(&self) -> FuserProperties {
        // Higher than the score of any fusion of elementwise operations.
        FuserProperties { score: if self.found.is_some() { 1 << 32 } else { 0 }, ready: self.found.is_some() }
    }

    fn len(&self) -> usize {
        usize::from(self.leading) + usize::from(self.found.is_some())
    }

    fn clone_dyn(&self) -> Box<dyn OperationFuser<CubeOptimization>> {
        Box::new(self.clone())
    }
}

/// An attention operation, and possibly one operation before it, which Burn runs itself.
struct Caught {
    operation: Operation,
    leading: bool,
}

impl FusedOperation for Caught {
    const NAME: &'static str = "flash_attention";
    type State = (Operation, bool);

    fn num_ops_fused(&self) -> usize {
        1 + usize::from(self.leading)
    }

    fn run(&mut self, context: &mut Context<CubeFusionHandle>, fallback: &dyn Fn(usize) -> Box<dyn FallbackOperation>) {
        if self.leading {
            fallback(0).run(context);
        }
        let burns_own = fallback(usize::from(self.leading));
        if state().guards == 0 {
            return burns_own.run(context);
        }
        let result = self.operation.run(context);
        let counts = &mut state().counts;
        match (&result, &self.operation) {
            (Ok(()), Operation::Backward(_)) => counts.backward += 1,
            (Ok(()), Operation::Forward(_) | Operation::ForwardWithLse(_)) => counts.forward += 1,
            (Err(why), _) => *counts.left.entry(why.to_string()).or_default() += 1,
        }
        if result.is_err() {
            burns_own.run(context);
        }
    }

    fn to_state(&self) -> Self::State {
        (self.operation.clone(), self.leading)
    }

    fn from_state(_device: &CubeDevice, (operation, leading): Self::State) -> Self {
        Caught { operation, leading }
    }
}
