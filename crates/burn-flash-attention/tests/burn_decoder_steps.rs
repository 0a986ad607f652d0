//! Steps of a decoder over both kinds of caches, compared with the whole sequence.

mod common;

use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_flash_attention::{
    AttentionError, FlashAttentionOptions, FlashDecoder, FlashDecoderConfig, FlashDecoderLayerConfig,
    FlashSelfAttentionConfig, KvCacheConfig, MlpConfig, PagedBatch, PagedKvCache, PagedKvCacheConfig,
    RotaryEmbeddingConfig, SequenceId,
};
use common::{close, targets};

const VOCAB: usize = 50;
const SEQ: usize = 40;

/// Layers with and without a window, whose rotary embeddings differ.
fn model(device: &Device) -> FlashDecoder {
    let attention = |base, window| {
        FlashSelfAttentionConfig::new(16, 4)
            .with_num_heads_kv(Some(2))
            .with_head_dim(Some(8))
            .with_rotary(Some(RotaryEmbeddingConfig::new(64).with_base(base)))
            .with_window_left(window)
    };
    let layer = |base, window| FlashDecoderLayerConfig::new(attention(base, window), MlpConfig::new(24));
    FlashDecoderConfig::new(VOCAB, vec![layer(100.0, Some(5)), layer(1000.0, None), layer(100.0, Some(5))]).init(device)
}

/// Tokens `[2, SEQ]`.
fn text(device: &Device) -> Tensor<2, Int> {
    let tokens = (0..2 * SEQ).map(|n| (n * n * 7 + n / SEQ + 3) as i32 % VOCAB as i32);
    Tensor::from_data(TensorData::new(tokens.collect::<Vec<_>>(), [2, SEQ]), device)
}

/// The new tokens of each sequence after so many, padded with the last ones of the text.
fn new_tokens(text: &Tensor<2, Int>, lens: [usize; 2], new: [usize; 2]) -> Tensor<2, Int> {
    let most = new.into_iter().max().unwrap();
    let rows = (0..2).map(|row| text.clone().narrow(0, row, 1).narrow(1, lens[row].min(SEQ - most), most));
    assert!(lens.into_iter().all(|len| len + most <= SEQ));
    Tensor::cat(rows.collect(), 0)
}

fn batches<'a>(caches: &'a mut [PagedKvCache], sequences: &[(SequenceId, usize)]) -> Vec<PagedBatch<'a>> {
    caches.iter_mut().map(|cache| cache.batch(sequences).unwrap()).collect()
}

#[test]
fn steps_over_both_caches_equal_the_whole_sequence() {
    for target in targets() {
        let device = &target.device;
        let (model, text) = (model(device), text(device));
        let whole = model.forward(text.clone(), &FlashAttentionOptions::new());
        let mut cache = model.new_cache(2, SEQ).unwrap();
        let mut paged = model.new_paged_caches(12).unwrap();
        assert_eq!(paged.iter().map(|cache| cache.config().window).collect::<Vec<_>>(), [Some(5), None, Some(5)]);
        let sequences = [(); 2].map(|()| paged.iter_mut().map(PagedKvCache::add).last().unwrap());
        let mut lens = [0; 2];
        for new in [[9, 4], [1, 1], [1, 3], [17, 2], [1, 1], [2, 1]] {
            let tokens = new_tokens(&text, lens, new);
            let of_each = Tensor::<1, Int>::from_data(new.map(|n| n as i32), device);
            let options = FlashAttentionOptions::new().with_seq_lens_q(of_each);
            let found = model.forward_step(tokens.clone(), &mut cache, &options);
            let mut batch = batches(&mut paged, &[(sequences[0], new[0]), (sequences[1], new[1])]);
            let hidden = model.try_hidden_step(tokens, &mut batch, &FlashAttentionOptions::new()).unwrap();
            let in_pages = model.logits(hidden);
            for row in 0..2 {
                let rows = |x: &Tensor<3>, at| x.clone().narrow(0, row, 1).narrow(1, at, new[row]);
                for (what, found) in [("cache", &found), ("pages", &in_pages)] {
                    close(&target, &format!("{what} after {lens:?}"), rows(found, 0), rows(&whole, lens[row]));
                }
                lens[row] += new[row];
            }
        }
    }
}

/// An error of a later layer takes nothing from the earlier ones.
#[test]
fn a_step_that_fails_leaves_all_caches_as_they_were() {
    for target in targets() {
        let device = &target.device;
        let (model, text) = (model(device), text(device));
        let options = FlashAttentionOptions::new();
        let whole = model.forward(text.clone().narrow(0, 0, 1), &options);
        let tokens = |at, new| text.clone().narrow(0, 0, 1).narrow(1, at, new);
        let rows = |at, new| whole.clone().narrow(1, at, new);

        let mut cache = model.new_cache(1, SEQ).unwrap();
        cache.layers[1] = KvCacheConfig::new(1, 2, 8, 20).init(device);
        model.forward_step(tokens(0, 18), &mut cache, &options);
        let error = model.try_forward_step(tokens(18, 3), &mut cache, &options).unwrap_err();
        assert!(matches!(error, AttentionError::CacheFull { capacity: 20, len: 18, new: 3 }), "{error}");
        assert!(cache.layers.iter().all(|cache| cache.max_len() == 18));
        close(&target, "cache", model.forward_step(tokens(18, 2), &mut cache, &options), rows(18, 2));

        let mut paged = model.new_paged_caches(8).unwrap();
        let page_size = paged[0].config().page_size;
        paged[1] = PagedKvCacheConfig::new(1, 2, 8).with_page_size(16).init(device);
        let sequence = paged.iter_mut().map(PagedKvCache::add).last().unwrap();
        let step = |paged: &mut [PagedKvCache], at, new| {
            let mut batch = batches(paged, &[(sequence, new)]);
            let found = model.try_hidden_step(tokens(at, new), &mut batch, &options);
            found.map(|hidden| close(&target, "pages", model.logits(hidden), rows(at, new)))
        };
        step(&mut paged, 0, 14).unwrap();
        let error = step(&mut paged, 14, 3).unwrap_err();
        assert!(matches!(error, AttentionError::OutOfPages { num_pages: 1, .. }), "{error}");
        assert!(paged.iter().all(|cache| cache.len(sequence) == Ok(14)), "pages of {page_size}");
        step(&mut paged, 14, 2).unwrap();

        let error = model.try_hidden_step(tokens(0, 1), &mut cache.layers[..2], &options).unwrap_err();
        assert!(error.to_string().starts_with("cache = 2 layers"), "{error}");
    }
}
