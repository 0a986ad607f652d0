//! What a sequence of a cache holds. In e4m3, that is what the rule of scales leaves of keys and values.

use burn_flash_attention::KvStorage;
use flash_attention_kernels::e4m3::{decode, encode, scale_of};

/// Keys and values of each position: those of all heads, one after the other.
#[derive(Clone)]
pub struct Sequence {
    rows: Vec<[Vec<f64>; 2]>,
    pages: Option<Pages>,
}

/// The pages of a sequence in e4m3.
#[derive(Clone)]
struct Pages {
    size: usize,
    heads: usize,
    /// Scales of keys and of values: of each head of each page.
    scales: [Vec<Vec<f32>>; 2],
}

impl Sequence {
    /// An empty sequence of a cache with so many heads and pages of so many positions, if it has pages.
    pub fn new(storage: KvStorage, page_size: usize, heads: usize) -> Self {
        let pages = Pages { size: page_size, heads, scales: [vec![], vec![]] };
        Sequence { rows: Vec::new(), pages: (storage == KvStorage::E4m3).then_some(pages) }
    }

    pub fn rows(&self) -> &[[Vec<f64>; 2]] {
        &self.rows
    }

    pub fn len(&self) -> usize {
        self.rows.len()
    }

    pub fn truncate(&mut self, len: usize) {
        self.rows.truncate(len);
    }

    /// The scale of the page of a position, of keys (0) or values (1) of a head.
    pub fn scale(&self, position: usize, nth: usize, head: usize) -> f32 {
        let pages = self.pages.as_ref().unwrap();
        pages.scales[nth][position / pages.size][head]
    }

    /// Appends the positions of one call.
    pub fn append(&mut self, new: Vec<[Vec<f64>; 2]>) {
        let begin = self.rows.len();
        self.rows.extend(new);
        let (rows, Some(pages)) = (&mut self.rows, &mut self.pages) else { return };
        for page in begin / pages.size..rows.len().div_ceil(pages.size) {
            let page_begin = page * pages.size;
            let rows = &mut rows[page_begin..];
            let rows_of_page = rows.len().min(pages.size);
            let before = begin.saturating_sub(page_begin);
            for (nth, head) in [0, 1].into_iter().flat_map(|nth| (0..pages.heads).map(move |head| (nth, head))) {
                let dim = rows[0][nth].len() / pages.heads;
                let elements = head * dim..(head + 1) * dim;
                let new = rows[before..rows_of_page].iter().flat_map(|row| &row[nth][elements.clone()]);
                let largest = new.fold(0.0, |largest: f64, x| if x.is_nan() { *x } else { largest.max(x.abs()) });
                let scales = &mut pages.scales[nth];
                scales.resize(scales.len().max(page + 1), vec![0.0; pages.heads]);
                let scale = &mut scales[page][head];
                let needed = scale_of(largest as f32);
                if before == 0 || needed.is_nan() || needed > *scale {
                    *scale = needed;
                }
                for row in &mut rows[..rows_of_page] {
                    row[nth][elements.clone()].iter_mut().for_each(|x| *x = rounded(*x, *scale));
                }
            }
        }
    }
}

/// What a page with this scale makes of a number.
pub fn rounded(x: f64, scale: f32) -> f64 {
    f64::from(decode(encode(x as f32 / scale)) * scale)
}
