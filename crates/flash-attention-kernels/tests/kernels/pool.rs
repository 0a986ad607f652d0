//! Keys and values in pages: the forward of a case reads them from a pool.

use super::{Case, Guarded, Layout, Poison, place};
use cubecl::client::Client;
use flash_attention_kernels::{AttentionProblem, Inputs, TensorView};

/// Pages of the pool that no sequence has.
const SPARE: usize = 3;

impl Case {
    /// Puts the keys and values of the forward into pages of this size.
    pub fn with_pages(mut self, page_size: usize) -> Self {
        self.page_size = Some(page_size);
        self
    }

    /// The problem of the forward.
    pub fn forward_problem(&self) -> AttentionProblem {
        let p = self.problem;
        let Some(page_size) = self.page_size else { return p };
        // One column more than the longest sequence needs.
        let max_pages = p.seq_k.div_ceil(page_size) + 1;
        p.with_page_table(&[p.batch, max_pages], p.batch * max_pages + SPARE, page_size).unwrap()
    }

    /// The inputs of the forward: with pages in no order, of which every row that no sequence has is NaN. Past the end of a sequence, the
    /// table has pages that do not exist.
    pub fn forward_inputs(&self, client: &Client, inputs: &Inputs) -> Inputs {
        let p = self.forward_problem();
        let Some(pages) = p.pages else { return inputs.clone() };
        let len = |b: usize| self.tensors.seq_lens_k.as_ref().map_or(p.seq_k, |lens| lens[b].min(p.seq_k));
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
        let bytes: Vec<u8> = words.into_iter().flat_map(u32::to_le_bytes).collect();
        Inputs {
            k: pool(&self.tensors.k, p.k_shape(), self.layouts[1]),
            v: pool(&self.tensors.v, p.v_shape(), self.layouts[2]),
            page_table: Some(TensorView::contiguous(client.create_from_slice(&bytes), [p.batch, pages.max_pages])),
            ..inputs.clone()
        }
    }
}
