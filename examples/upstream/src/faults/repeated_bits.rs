use crate::Finding;
use burn::tensor::{Device, Distribution, Int, Tensor, TensorData, module};

pub fn look(device: &Device) -> Finding {
    let device = &device.clone().autodiff();
    let random = |shape: [usize; 2]| Tensor::<2>::random(shape, Distribution::Default, device).detach();
    let (table, slopes, rows) = (random([50, 64]), random([8192, 64]), random([8192, 64]));
    let tokens = TensorData::new((0..8192).map(|i: i32| i * i % 50).collect(), [1, 8192]);
    let tokens = Tensor::<2, Int>::from_data(tokens, device);
    let gradient = || {
        let table = table.clone().require_grad();
        let out = module::embedding(table.clone(), tokens.clone()) * slopes.clone().unsqueeze();
        table.grad(&out.sum().backward()).expect("the table has a gradient").into_data()
    };
    let product = || rows.clone().transpose().matmul(slopes.clone()).into_data();
    let sum = || rows.clone().sum_dim(0).into_data();
    // How many of 20 pairs differ, and by how much of the larger value at most.
    let others = |operation: &dyn Fn() -> TensorData| {
        (0..20).fold((0, 0f32), |(count, largest), _| {
            let (a, b) = (operation(), operation());
            let apart = a.iter::<f32>().zip(b.iter::<f32>()).map(|(a, b)| (a - b).abs() / a.abs().max(b.abs()));
            (count + usize::from(a != b), apart.fold(largest, f32::max))
        })
    };
    let [gradients, products, sums] = [others(&gradient), others(&product), others(&sum)];
    let numbers = format!("pairs of 20 that differ, and by how much: gradients of embeddings {gradients:?}, products {products:?}, sums {sums:?}");
    Finding::new(gradients.0 + products.0 + sums.0 > 0, numbers)
}
