//! The device, and the choices for problems of recent calls: a call like an earlier one of its thread plans nothing again.
//!
//! Each thread remembers its own, so that nothing is locked. All that a choice depends on is compared: the properties of the device, the
//! problem, and the kernel that was asked for. Errors are not remembered, and the tuner, whose answers change, asks for no choice here.

use super::{BackwardTiles, Case, Device, Forward, Kernel, Plan, choose_backward, choose_forward};
use crate::error::Result;
use crate::problem::{AttentionOptions, AttentionProblem};
use cubecl::client::Client;
use cubecl::ir::DeviceProperties;
use std::cell::RefCell;
use std::ptr;
use std::rc::Rc;
use std::sync::Arc;

/// Largest numbers of problems and devices that a thread remembers.
const PROBLEMS: usize = 32;
const DEVICES: usize = 8;

thread_local! {
    static PROBLEMS_OF_THREAD: RefCell<Vec<Choices>> = const { RefCell::new(Vec::new()) };
    /// With the properties that they were made from, which a client holds as long as the device is open.
    static DEVICES_OF_THREAD: RefCell<Vec<(Arc<DeviceProperties>, Rc<Device>)>> = const { RefCell::new(Vec::new()) };
}

/// What has been chosen for a problem so far.
struct Choices {
    device: Rc<Device>,
    problem: AttentionProblem,
    asked: Option<Kernel>,
    forward: Option<Forward>,
    backward: Option<BackwardTiles>,
    plan: Option<Rc<Plan>>,
}

/// [`Device::of`] this client, made once for each thread.
pub(crate) fn device(client: &Client) -> Rc<Device> {
    DEVICES_OF_THREAD.with_borrow_mut(|known| {
        let of_client = |(properties, _): &(Arc<DeviceProperties>, _)| ptr::eq(&**properties, client.properties());
        if let Some(found) = known.iter().find(|known| of_client(known)) {
            return found.1.clone();
        }
        if known.len() == DEVICES {
            known.remove(0);
        }
        let device = Rc::new(Device::of(client));
        known.push((client.properties_shared(), device.clone()));
        device
    })
}

/// The forward for this problem.
pub(crate) fn forward(device: &Rc<Device>, problem: &AttentionProblem) -> Result<Forward> {
    let make = || choose_forward(Case { device, problem }, None, &mut Vec::new());
    chosen(device, problem, None, |choices| &mut choices.forward, make)
}

/// The backward for this problem.
pub(crate) fn backward(device: &Rc<Device>, problem: &AttentionProblem) -> Result<BackwardTiles> {
    let make = || choose_backward(Case { device, problem }, None, &mut Vec::new());
    chosen(device, problem, None, |choices| &mut choices.backward, make)
}

/// The plan for this problem and the kernel that was asked for, which `make` makes.
pub(super) fn plan(
    device: &Rc<Device>,
    problem: &AttentionProblem,
    asked: Option<Kernel>,
    make: impl FnOnce() -> Result<Plan>,
) -> Result<Rc<Plan>> {
    chosen(device, problem, asked, |choices| &mut choices.plan, || make().map(Rc::new))
}

/// A choice, remembered or else made.
fn chosen<T: Clone>(
    device: &Rc<Device>,
    problem: &AttentionProblem,
    asked: Option<Kernel>,
    choice: fn(&mut Choices) -> &mut Option<T>,
    make: impl FnOnce() -> Result<T>,
) -> Result<T> {
    // Nothing depends on the number of a seed, which differs in each step of a training.
    let of = AttentionProblem { options: AttentionOptions { dropout_seed: None, ..problem.options }, ..*problem };
    let is_same = |known: &Choices| known.problem == of && known.asked == asked && Rc::ptr_eq(&known.device, device);
    // The problem found last is the first one, and the last one is forgotten.
    let find =
        |known: &mut Vec<Choices>| known.iter().position(&is_same).inspect(|found| known.swap(0, *found)).is_some();
    let remembered = |known: &mut Vec<Choices>| if find(known) { choice(&mut known[0]).clone() } else { None };
    if let Some(found) = PROBLEMS_OF_THREAD.with_borrow_mut(remembered) {
        return Ok(found);
    }
    let made = make()?;
    PROBLEMS_OF_THREAD.with_borrow_mut(|known| {
        if !find(known) {
            known.truncate(PROBLEMS - 1);
            let device = device.clone();
            let none = Choices { device, problem: of, asked, forward: None, backward: None, plan: None };
            known.insert(0, none);
        }
        *choice(&mut known[0]) = Some(made.clone());
    });
    Ok(made)
}
