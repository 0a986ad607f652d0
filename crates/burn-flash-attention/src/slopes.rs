//! ALiBi slopes.

use burn::tensor::{Device, Tensor};

/// ALiBi slopes, `[num_heads_q]` or `[batch, num_heads_q]`. The score of query `i` and key `j` gets `−slope · |i − j|` added, where `i` is
/// the query's position among the keys (Press et al., arXiv:2108.12409, section 3). Differentiable.
///
/// ```
/// # #[cfg(feature = "flex")] {
/// use burn::tensor::{Device, Tensor};
/// use burn_flash_attention::{AlibiSlopes, FlashAttentionOptions};
///
/// let device = Device::flex();
/// let fixed = FlashAttentionOptions::new().with_alibi_slopes(AlibiSlopes::geometric(8, &device));
/// let learned = FlashAttentionOptions::new().with_alibi_slopes(Tensor::<1>::ones([8], &device.autodiff()).require_grad());
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct AlibiSlopes(Tensor<2>);

impl AlibiSlopes {
    /// The slopes of the paper: `2^(−8 h / n)` for heads `h = 1 … n`. If `n` is not a power of two: the slopes for the next lower power of
    /// two, followed by every other slope for the next higher one.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn_flash_attention::AlibiSlopes;
    ///
    /// let slopes = AlibiSlopes::geometric(4, &burn::tensor::Device::flex()).into_tensor();
    /// assert_eq!(slopes.into_data().to_vec::<f32>().unwrap(), [0.25, 0.0625, 0.015625, 0.00390625]);
    /// # }
    /// ```
    pub fn geometric(num_heads: usize, device: &Device) -> Self {
        Tensor::<1>::from_data(geometric(num_heads).as_slice(), device).into()
    }

    /// Returns the slopes as `[1 or batch, num_heads_q]`.
    ///
    /// ```
    /// # #[cfg(feature = "flex")] {
    /// use burn::tensor::{Device, Tensor};
    /// use burn_flash_attention::AlibiSlopes;
    ///
    /// assert_eq!(AlibiSlopes::from(Tensor::<1>::ones([8], &Device::flex())).into_tensor().dims(), [1, 8]);
    /// # }
    /// ```
    pub fn into_tensor(self) -> Tensor<2> {
        self.0
    }
}

impl From<Tensor<1>> for AlibiSlopes {
    fn from(slopes: Tensor<1>) -> Self {
        AlibiSlopes(slopes.unsqueeze())
    }
}

impl From<Tensor<2>> for AlibiSlopes {
    fn from(slopes: Tensor<2>) -> Self {
        AlibiSlopes(slopes)
    }
}

fn geometric(num_heads: usize) -> Vec<f32> {
    let of_power = |n: usize| (1..=n).map(move |h| 2f64.powf(-8.0 * h as f64 / n as f64) as f32);
    let below = (num_heads + 1).next_power_of_two() / 2;
    of_power(below.max(1)).chain(of_power(2 * below).step_by(2)).take(num_heads).collect()
}

#[cfg(test)]
mod tests {
    use super::geometric;

    #[test]
    fn heads_that_are_no_power_of_two_take_every_other_slope_of_the_next() {
        assert_eq!(geometric(6), [0.25, 0.0625, 0.015625, 0.00390625, 0.5, 0.125]);
        assert_eq!(geometric(8)[..2], [0.5, 0.25]);
        assert_eq!([geometric(0).len(), geometric(1).len(), geometric(12).len()], [0, 1, 12]);
    }
}
