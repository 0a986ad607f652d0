//! Speed on Flex against composed operations. Temporary.
mod common;
use burn::tensor::*;
use burn_flash_attention::*;
use common::*;
use flash_attention_kernels::{AttentionOptions, Dtype};
use std::time::Instant;

#[test]
#[ignore]
fn speed() {
    let Some(target) = target("flex") else { return };
    let none = AttentionOptions::default();
    let causal = AttentionOptions { causal: true, ..none };
    let cap = AttentionOptions { softcap: Some(20.0), ..none };
    for (name, sizes, dtype, options, bias) in [
        ("128", [2, 8, 8, 128, 128, 64, 64], Dtype::F32, none, None),
        ("512", [1, 8, 8, 512, 512, 64, 64], Dtype::F32, none, None),
        ("1024", [1, 4, 4, 1024, 1024, 64, 64], Dtype::F32, none, None),
        ("1024x1", [1, 1, 1, 1024, 1024, 64, 64], Dtype::F32, none, None),
        ("2048 causal", [1, 2, 2, 2048, 2048, 64, 64], Dtype::F32, causal, None),
        ("1024 d128", [1, 4, 4, 1024, 1024, 128, 128], Dtype::F32, none, None),
        ("1024 d32", [1, 4, 4, 1024, 1024, 32, 32], Dtype::F32, none, None),
        ("1024 softcap", [1, 4, 4, 1024, 1024, 64, 64], Dtype::F32, cap, None),
        ("1024 bias", [1, 4, 4, 1024, 1024, 64, 64], Dtype::F32, none, Some([1, 4, 1024, 1024])),
        ("1024 bias b2", [2, 4, 4, 1024, 1024, 64, 64], Dtype::F32, none, Some([1, 4, 1024, 1024])),
        ("gqa 1024", [1, 8, 2, 1024, 1024, 64, 64], Dtype::F32, none, None),
        ("f16 512", [1, 4, 4, 512, 512, 64, 64], Dtype::F16, none, None),
        ("bf16 512", [1, 4, 4, 512, 512, 64, 64], Dtype::BF16, none, None),
        ("decode", [4, 8, 8, 1, 2048, 64, 64], Dtype::F32, none, None),
        ("tiny", [2, 4, 4, 16, 16, 32, 32], Dtype::F32, none, None),
    ] {
        let mut problem = problem(sizes, dtype, options);
        if let Some(shape) = bias {
            problem = problem.with_bias(&shape).unwrap();
        }
        let data = Data::random(problem, 1);
        let time = |f: &dyn Fn()| {
            f();
            let mut best = f64::MAX;
            let start = Instant::now();
            while start.elapsed().as_secs_f64() < 0.6 {
                let t = Instant::now();
                f();
                best = best.min(t.elapsed().as_secs_f64());
            }
            best * 1e3
        };
        let how = How { tracked: Tracked::NONE, ..How::default() };
        let tensors = Tensors::new(&data, &target.device, how);
        let ours = time(&|| {
            flash_attention(tensors.q.clone(), tensors.k.clone(), tensors.v.clone(), &tensors.options).into_data();
        });
        let m = if options.causal {
            Some(Tensor::<2, Bool>::tril_mask([sizes[3], sizes[4]], 0, &target.device).unsqueeze::<4>())
        } else {
            None
        };
        let comp = |t: &Tensors| -> Tensor<4> {
            let scale = problem.softmax_scale();
            let g = problem.group_size();
            let rep = |x: &Tensor<4>| {
                if g == 1 {
                    x.clone()
                } else {
                    let [b, h, s, d] = x.dims();
                    x.clone().unsqueeze_dim::<5>(2).expand([b, h, g, s, d]).reshape([b, h * g, s, d])
                }
            };
            let mut s = t.q.clone().matmul(rep(&t.k).swap_dims(2, 3)).mul_scalar(scale);
            if let Some(c) = options.softcap {
                s = s.div_scalar(c).tanh().mul_scalar(c);
            }
            if let Some(m) = &m {
                s = s.mask_fill(m.clone(), f32::NEG_INFINITY);
            }
            if let Some(b) = &t.options.bias {
                s = s + b.clone();
            }
            activation::softmax(s, 3).matmul(rep(&t.v))
        };
        let theirs = time(&|| {
            comp(&tensors).into_data();
        });
        let burn_mod = time(&|| {
            module::attention(
                tensors.q.clone(),
                tensors.k.clone(),
                tensors.v.clone(),
                None,
                tensors.options.bias.clone(),
                ops::AttentionModuleOptions {
                    is_causal: options.causal,
                    softcap: options.softcap.map(f64::from),
                    ..Default::default()
                },
            )
            .into_data();
        });
        let dev = target.device.clone().autodiff();
        let tt = Tensors::new(&data, &dev, How::default());
        let dout = tensor(&data.dout, problem.o_shape(), dtype, &dev);
        let train = |f: &dyn Fn() -> Tensor<4>| {
            time(&|| {
                let l = (f() * dout.clone()).sum();
                let g = l.backward();
                tt.q.grad(&g).unwrap().into_data();
                tt.v.grad(&g).unwrap().into_data();
            })
        };
        let o2 = train(&|| flash_attention(tt.q.clone(), tt.k.clone(), tt.v.clone(), &tt.options));
        let t2 = train(&|| comp(&tt));
        let gf = problem.forward_flops() / 1e6;
        println!(
            "{name:14} fwd ours {ours:8.2} ms ({:5.1} GF/s) composed {theirs:8.2} x{:.2} burn {burn_mod:8.2} x{:.2} | train ours {o2:8.2} composed {t2:8.2} x{:.2}",
            gf / ours,
            theirs / ours,
            burn_mod / ours,
            t2 / o2
        );
    }
}
