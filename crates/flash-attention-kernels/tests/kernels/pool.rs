//! Keys and values in pages: the forward of a case reads them from a pool.

use super::{Case, Layout, place};
use cubecl::client::Client;
use flash_attention_kernels::e4m3::{decode, encode, page_bytes, scale_of};
use flash_attention_kernels::{AttentionProblem, Inputs, KvStorage, TensorView};

/// Pages of the pool that no sequence has.
const SPARE: usize = 3;

impl Case {
    /// Puts the keys and values of the forward into pages of this size.
    pub fn with_pages(mut self, page_size: usize) -> Self {
        self.page_size = Some(page_size);
        self
    }

    /// Number of keys of a batch.
    fn keys_of(&self, batch: usize) -> usize {
        self.tensors.seq_lens_k.as_ref().map_or(self.problem.seq_k, |lens| lens[batch].min(self.problem.seq_k))
    }

    /// Stores the pages of the forward in e4m3, and rounds keys and values to what is stored. The scale of each page of a head is a random
    /// one that is large enough, so that numbers of all kinds occur. The case has pages, and its lengths if it is to have some.
    pub fn with_e4m3(mut self) -> Self {
        let (p, page_size) = (self.problem, self.page_size.expect("the case has pages"));
        let lens: Vec<usize> = (0..p.batch).map(|b| self.keys_of(b)).collect();
        let scales =
            [(&mut self.tensors.k, p.head_dim), (&mut self.tensors.v, p.head_dim_v)].map(|(values, columns)| {
                let mut scales = Vec::new();
                for head in 0..p.batch * p.num_heads_kv {
                    for first in (0..p.seq_k).step_by(page_size) {
                        let last = lens[head / p.num_heads_kv].clamp(first, first + page_size);
                        let rows = &mut values[(head * p.seq_k + first) * columns..(head * p.seq_k + last) * columns];
                        let largest = rows.iter().fold(0.0f32, |largest, x| largest.max(x.abs() as f32));
                        let unknown = rows.iter().any(|x| !x.is_finite());
                        let random = ((scales.len() + columns) as u32).wrapping_mul(2_654_435_761) >> 29;
                        let scale = if unknown { f32::NAN } else { scale_of(largest) * (1 << random) as f32 };
                        for value in rows {
                            *value = f64::from(decode(encode(*value as f32 / scale)) * scale);
                        }
                        scales.push(scale);
                    }
                }
                scales
            });
        self.kv_scales = Some(scales);
        // Rows that are one in memory are rounded with the scales of several pages.
        for layout in &mut self.layouts[1..3] {
            if matches!(layout, Layout::RepeatedRows | Layout::Scalar) {
                *layout = Layout::Contiguous;
            }
        }
        self
    }

    /// The problem of the forward.
    pub fn forward_problem(&self) -> AttentionProblem {
        let p = self.problem;
        let Some(page_size) = self.page_size else { return p };
        // One column more than the longest sequence needs.
        let max_pages = p.seq_k.div_ceil(page_size) + 1;
        let storage = if self.kv_scales.is_some() { KvStorage::E4m3 } else { KvStorage::Elements };
        let paged = p.with_page_table(&[p.batch, max_pages], p.batch * max_pages + SPARE, page_size).unwrap();
        paged.with_kv_storage(storage).unwrap()
    }

    /// The inputs of the forward: with pages in no order, of which every row that no sequence has is NaN. Past the end of a sequence, the
    /// table has pages that do not exist. In e4m3, the scale of a page that no sequence has is NaN, and other rows are the largest code.
    pub fn forward_inputs(&self, client: &Client, inputs: &Inputs) -> Inputs {
        let p = self.forward_problem();
        let Some(pages) = p.pages else { return inputs.clone() };
        let len = |b: usize| self.keys_of(b);
        // Steps through all pages, since no pool has a multiple of the prime.
        let page = |b: usize, nth: usize| (b * pages.max_pages + nth) * 7919 % pages.num_pages;
        let mut words = Vec::new();
        for b in 0..p.batch {
            let used = len(b).div_ceil(pages.page_size);
            words.extend((0..pages.max_pages).map(|nth| if nth < used { page(b, nth) as u32 } else { u32::MAX }));
        }
        let pool = |values: &[f64], shape: [usize; 4], layout: Layout| {
            let [_, heads, rows, columns] = shape;
            let mut pool = vec![f64::NAN; shape.iter().product()];
            for (b, head) in (0..p.batch).flat_map(|b| (0..heads).map(move |head| (b, head))) {
                for key in 0..len(b) {
                    let from = ((b * heads + head) * p.seq_k + key) * columns;
                    let to = ((page(b, key / rows) * heads + head) * rows + key % rows) * columns;
                    pool[to..to + columns].copy_from_slice(&values[from..from + columns]);
                }
            }
            // A layout that repeats rows has none of its own in a pool.
            let layout =
                if matches!(layout, Layout::RepeatedRows | Layout::Scalar) { Layout::Contiguous } else { layout };
            place(client, p.dtype, shape, layout, &pool).view
        };
        let e4m3 = |values: &[f64], shape: [usize; 4], scales: &[f32]| {
            let [_, heads, rows, columns] = shape;
            let mut pool = Vec::new();
            for _ in 0..shape[0] * heads {
                pool.extend(vec![0x7F; rows * columns]);
                pool.extend([f32::NAN, f32::NAN, f32::NAN, f32::NAN].map(f32::to_le_bytes).as_flattened());
            }
            let of_sequence = p.seq_k.div_ceil(rows);
            for (b, head) in (0..p.batch).flat_map(|b| (0..heads).map(move |head| (b, head))) {
                for key in 0..len(b) {
                    let scale = scales[(b * heads + head) * of_sequence + key / rows];
                    let from = ((b * heads + head) * p.seq_k + key) * columns;
                    let start = (page(b, key / rows) * heads + head) * page_bytes(rows, columns);
                    for column in 0..columns {
                        pool[start + key % rows * columns + column] = encode(values[from + column] as f32 / scale);
                    }
                    pool[start + rows * columns..][..4].copy_from_slice(&scale.to_le_bytes());
                }
            }
            TensorView::e4m3_pages(client.create_from_slice(&pool), shape)
        };
        let (k, v) = match &self.kv_scales {
            None => (
                pool(&self.tensors.k, p.k_shape(), self.layouts[1]),
                pool(&self.tensors.v, p.v_shape(), self.layouts[2]),
            ),
            Some([of_k, of_v]) => (e4m3(&self.tensors.k, p.k_shape(), of_k), e4m3(&self.tensors.v, p.v_shape(), of_v)),
        };
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        Inputs {
            k,
            v,
            page_table: Some(TensorView::contiguous(client.create_from_slice(&bytes), [p.batch, pages.max_pages])),
            ..inputs.clone()
        }
    }
}
