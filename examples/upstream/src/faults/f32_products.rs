use crate::Finding;
use burn::tensor::{DType, Device, Tensor, TensorData};

pub fn look(device: &Device) -> Finding {
    const N: usize = 128;
    // 1 + 2^-12, which tf32 does not have, times the identity.
    let matrix = |value: f32| TensorData::new((0..N * N).map(|i| if i % (N + 1) == 0 { value } else { 0.0 }).collect(), [N, N]);
    let [a, b] = [1.0 + 2f32.powi(-12), 1.0].map(|x| Tensor::<2>::from_data(matrix(x), (device, DType::F32)));
    let corner = a.matmul(b).narrow(0, 0, 1).narrow(1, 0, 1).into_scalar::<f32>();
    Finding::new(corner != 1.0 + 2f32.powi(-12), format!("1 + 2^-12 times the identity gives 1 + {:e}", corner - 1.0))
}
