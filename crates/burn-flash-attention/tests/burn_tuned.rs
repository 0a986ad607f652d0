//! The tuner's choice gives correct results and is reported.
#![cfg(all(feature = "autotune", feature = "cube"))]

mod common;

use burn::tensor::{Distribution, Tensor};
use burn_flash_attention::{FlashAttentionOptions, Tuned, flash_attention, plan, tuned};
use common::{burns_own, targets};

#[test]
fn tuned_results_are_correct_and_reported() {
    for target in targets() {
        let device = target.device.clone().autodiff();
        let random = || Tensor::<4>::random([1, 2, 50, 24], Distribution::Default, &device).require_grad();
        let (q, k, v) = (random(), random(), random());
        let options = FlashAttentionOptions::new().with_causal(true);

        // The second call runs the choice of the first one.
        let twice: Vec<_> = (0..2)
            .map(|_| {
                let out = flash_attention(q.clone(), k.clone(), v.clone(), &options);
                let gradients = out.clone().sum().backward();
                [&q, &k, &v].map(|x| x.grad(&gradients).unwrap().into_data()).into_iter().chain([out.into_data()])
            })
            .collect();
        let [first, second]: [_; 2] = twice.try_into().ok().unwrap();
        for (first, second) in first.zip(second) {
            first.assert_approx_eq::<f32>(&second, burns_own(&target));
        }

        let choice = tuned(&q, &k, &v, &options).unwrap();
        eprintln!("{}: {choice:?}", target.name);
        if target.name == "flex" {
            assert_eq!(choice, Tuned::default());
        } else if let Some(forward) = choice.forward {
            assert!(plan(&q, &k, &v, &options).unwrap().to_string().contains(forward.kernel().name()));
        }
    }
}
