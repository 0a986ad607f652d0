//! Which sequence has which pages: the host's part of a paged cache, without any tensor.

use super::SequenceId;
use flash_attention_kernels::AttentionError;
use std::collections::HashMap;

/// Sequences, their pages, and the pages that are free.
#[derive(Debug)]
pub(super) struct Allocator {
    page_size: usize,
    /// How far back new positions see, if sequences forget what is further back.
    window: Option<usize>,
    /// How many sequences have each page.
    owners: Vec<u32>,
    /// Free pages; the last one is taken first.
    free: Vec<u32>,
    sequences: HashMap<SequenceId, Sequence>,
    /// Number of sequences that there have been.
    made: u64,
}

/// A sequence.
#[derive(Clone, Debug, Default)]
pub(super) struct Sequence {
    /// The page of each block of positions. Those of forgotten positions are the page of the first position that is left, which exists.
    pub pages: Vec<u32>,
    /// Number of pages among them, from the first one on, whose positions have been forgotten.
    forgotten: usize,
    /// Number of positions.
    pub len: usize,
}

/// What has changed where sequences got room for new positions.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Reserved {
    /// Pages whose contents must be copied, each with the page that they go to.
    pub copies: Vec<[u32; 2]>,
    /// Whether any sequence's pages have changed.
    pub changed: bool,
}

impl Allocator {
    pub fn new(num_pages: usize, page_size: usize, window: Option<usize>) -> Self {
        let free = (0..num_pages as u32).rev().collect();
        Allocator { page_size, window, owners: vec![0; num_pages], free, sequences: HashMap::new(), made: 0 }
    }

    /// Number of free pages.
    pub fn free_pages(&self) -> usize {
        self.free.len()
    }

    /// Number of sequences.
    pub fn num_sequences(&self) -> usize {
        self.sequences.len()
    }

    /// A new sequence without positions.
    pub fn add(&mut self) -> SequenceId {
        self.insert(Sequence::default())
    }

    fn insert(&mut self, sequence: Sequence) -> SequenceId {
        let id = SequenceId(self.made);
        self.made += 1;
        self.sequences.insert(id, sequence);
        id
    }

    pub fn get(&self, id: SequenceId) -> Result<&Sequence, AttentionError> {
        self.sequences.get(&id).ok_or(AttentionError::NoSequence { sequence: id.0 })
    }

    /// A new sequence with the positions of this one, whose pages both have.
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId, AttentionError> {
        let sequence = self.get(id)?.clone();
        for page in sequence.live() {
            self.owners[*page as usize] += 1;
        }
        Ok(self.insert(sequence))
    }

    /// Removes a sequence, and frees the pages that no other one has.
    pub fn free(&mut self, id: SequenceId) -> Result<(), AttentionError> {
        let sequence = self.sequences.remove(&id).ok_or(AttentionError::NoSequence { sequence: id.0 })?;
        sequence.live().iter().for_each(|page| self.release(*page));
        Ok(())
    }

    /// Takes a sequence's positions from `len` on away. Returns whether it had more.
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<bool, AttentionError> {
        let sequence = self.get(id)?;
        if len >= sequence.len {
            return Ok(false);
        }
        if len.saturating_sub(self.window.unwrap_or(len)) < sequence.forgotten * self.page_size {
            return Err(AttentionError::Unsupported {
                option: "len",
                value: len.to_string(),
                why: "the window of the next position would reach positions that have been forgotten",
            });
        }
        let kept = len.div_ceil(self.page_size);
        let mut sequence = self.sequences.remove(&id).unwrap_or_default();
        sequence.pages.drain(kept..).for_each(|page| self.release(page));
        sequence.len = len;
        self.sequences.insert(id, sequence);
        Ok(true)
    }

    fn release(&mut self, page: u32) {
        let owners = &mut self.owners[page as usize];
        *owners -= 1;
        if *owners == 0 {
            self.free.push(page);
        }
    }

    /// Forgets the pages of sequences that no window of new positions reaches, then gives each sequence room for its new positions. A page
    /// that another sequence has as well is not written to: a copy takes its place. Nothing changes if there are too few pages.
    pub fn reserve(&mut self, batch: &[(SequenceId, usize)]) -> Result<Reserved, AttentionError> {
        let needed = self.needed(batch)?;
        if needed.pages > self.free.len() + needed.forgotten {
            let (num_pages, free) = (self.owners.len(), self.free.len() + needed.forgotten);
            return Err(AttentionError::OutOfPages { num_pages, free, needed: needed.pages });
        }
        let mut reserved = Reserved { changed: needed.pages > 0 || needed.left, ..Reserved::default() };
        // In most steps, new positions fit into the last pages.
        if !reserved.changed {
            return Ok(reserved);
        }
        for (id, _) in batch {
            let mut sequence = self.sequences.remove(id).unwrap_or_default();
            let forgotten = sequence.out_of_reach(self.window, self.page_size);
            sequence.pages[sequence.forgotten..forgotten].iter().for_each(|page| self.release(*page));
            sequence.forgotten = forgotten;
            self.sequences.insert(*id, sequence);
        }
        for (id, new) in batch.iter().filter(|(_, new)| *new > 0) {
            let mut sequence = self.sequences.remove(id).unwrap_or_default();
            if sequence.ends_within_page(self.page_size) {
                let last = sequence.pages.len() - 1;
                let shared = sequence.pages[last];
                if self.owners[shared as usize] > 1 {
                    let own = self.take();
                    self.release(shared);
                    sequence.pages[last] = own;
                    reserved.copies.push([shared, own]);
                }
            }
            while sequence.pages.len() * self.page_size < sequence.len + new {
                let page = self.take();
                sequence.pages.push(page);
            }
            self.sequences.insert(*id, sequence);
        }
        for (id, _) in batch {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.point_forgotten_at_first();
            }
        }
        Ok(reserved)
    }

    /// A free page, which there is: `reserve` has counted them.
    fn take(&mut self) -> u32 {
        let page = self.free.pop().unwrap_or_else(|| panic!("pages were counted before they were taken"));
        self.owners[page as usize] = 1;
        page
    }

    /// Pages that new positions need, and pages that are free once what windows do not reach is forgotten.
    fn needed(&self, batch: &[(SequenceId, usize)]) -> Result<Needed, AttentionError> {
        let mut needed = Needed::default();
        // Sequences of the batch that write to a shared page, and that forget one.
        let (mut written, mut left) = (HashMap::<u32, u32>::new(), HashMap::<u32, u32>::new());
        for (id, new) in batch {
            let sequence = self.get(*id)?;
            let forgotten = sequence.out_of_reach(self.window, self.page_size);
            for page in &sequence.pages[sequence.forgotten..forgotten] {
                *left.entry(*page).or_default() += 1;
            }
            if *new > 0 {
                needed.pages += (sequence.len + new).div_ceil(self.page_size) - sequence.pages.len();
                if sequence.ends_within_page(self.page_size) {
                    *written.entry(sequence.pages[sequence.pages.len() - 1]).or_default() += 1;
                }
            }
        }
        needed.left = !left.is_empty();
        needed.forgotten = left.iter().filter(|(page, count)| self.owners[**page as usize] == **count).count();
        // The last owner of a page writes to it.
        let copies = written.iter().map(|(page, count)| (*count).min(self.owners[*page as usize] - 1) as usize);
        needed.pages += copies.sum::<usize>();
        Ok(needed)
    }

    /// Counts the new positions of sequences, which have room for them.
    pub fn appended(&mut self, batch: &[(SequenceId, usize)]) {
        for (id, new) in batch {
            if let Some(sequence) = self.sequences.get_mut(id) {
                sequence.len += new;
            }
        }
    }
}

/// Pages that a call needs.
#[derive(Default)]
struct Needed {
    pages: usize,
    /// Whether sequences forget pages before.
    left: bool,
    /// Pages that become free by that.
    forgotten: usize,
}

impl Sequence {
    /// The pages of positions that have not been forgotten.
    fn live(&self) -> &[u32] {
        &self.pages[self.forgotten..]
    }

    /// Number of pages that no window of this many positions before the next one reaches. Without a window, there are none.
    fn out_of_reach(&self, window: Option<usize>, page_size: usize) -> usize {
        let window = window.unwrap_or(self.len);
        (self.len.saturating_sub(window) / page_size).min(self.pages.len()).max(self.forgotten)
    }

    /// Whether the next position goes to a page that has positions.
    fn ends_within_page(&self, page_size: usize) -> bool {
        !self.len.is_multiple_of(page_size) && !self.live().is_empty()
    }

    /// Pages that a tile may read beside those of its window are read where the sequence has positions of its own.
    fn point_forgotten_at_first(&mut self) {
        let Some(first) = self.pages.get(self.forgotten).copied() else { return };
        self.pages[..self.forgotten].fill(first);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::rngs::StdRng;
    use rand::{Rng, SeedableRng};

    /// Checks that pages are free or counted, and that no page is written to that another sequence has.
    fn check(of: &Allocator) {
        let mut owners = vec![0; of.owners.len()];
        for sequence in of.sequences.values() {
            assert_eq!(sequence.pages.len(), sequence.len.div_ceil(of.page_size));
            sequence.live().iter().for_each(|page| owners[*page as usize] += 1);
            if let Some(first) = sequence.live().first() {
                assert!(sequence.pages[..sequence.forgotten].iter().all(|page| page == first));
            }
        }
        assert_eq!(owners, of.owners);
        let mut free = of.free.clone();
        free.sort_unstable();
        let unowned = (0..owners.len() as u32).filter(|page| owners[*page as usize] == 0);
        assert!(free.into_iter().eq(unowned));
    }

    #[test]
    fn forks_share_pages_until_one_writes() {
        let mut of = Allocator::new(4, 16, None);
        let first = of.add();
        assert_eq!(of.reserve(&[(first, 20)]).unwrap(), Reserved { copies: vec![], changed: true });
        of.appended(&[(first, 20)]);
        let second = of.fork(first).unwrap();
        assert_eq!(of.free_pages(), 2);
        // Both write to the second page: one of them gets a copy.
        let reserved = of.reserve(&[(first, 1), (second, 1)]).unwrap();
        assert_eq!(reserved, Reserved { copies: vec![[1, 2]], changed: true });
        of.appended(&[(first, 1), (second, 1)]);
        assert_eq!(of.get(first).unwrap().pages, [0, 2]);
        assert_eq!(of.get(second).unwrap().pages, [0, 1]);
        // 11 positions more fit into the last pages. One page is left for two sequences that need one each.
        assert!(!of.reserve(&[(first, 11), (second, 11)]).unwrap().changed);
        of.appended(&[(first, 11), (second, 11)]);
        let error = of.reserve(&[(first, 1), (second, 1)]).unwrap_err();
        assert_eq!(error, AttentionError::OutOfPages { num_pages: 4, free: 1, needed: 2 });
        of.free(second).unwrap();
        assert_eq!(of.free_pages(), 2);
        assert_eq!(of.free(second).unwrap_err(), AttentionError::NoSequence { sequence: 1 });
        check(&of);
    }

    #[test]
    fn windows_forget_pages() {
        let mut of = Allocator::new(3, 16, Some(20));
        let id = of.add();
        // Three pages suffice for any number of positions: the window, and a page that it begins in.
        for step in 0..100 {
            of.reserve(&[(id, 7)]).unwrap();
            of.appended(&[(id, 7)]);
            check(&of);
            assert_eq!(of.get(id).unwrap().len, 7 * (step + 1));
        }
        // The last step saw 20 positions before its first, which are still there if it is taken back.
        assert!(of.truncate(id, 693).unwrap());
        assert!(of.truncate(id, 600).is_err());
        assert!(!of.truncate(id, 700).unwrap());
        check(&of);
    }

    /// Nothing is lost, and an error changes nothing, whatever happens in which order.
    #[test]
    fn pages_are_never_lost() {
        let mut random = StdRng::seed_from_u64(4);
        for window in [None, Some(0), Some(33)] {
            let mut of = Allocator::new(40, 16, window);
            let mut ids = Vec::new();
            let (mut full, mut copied) = (0, 0);
            for _ in 0..3000 {
                let any = |random: &mut StdRng, ids: &[SequenceId]| ids[random.random_range(0..ids.len())];
                match random.random_range(0..8) {
                    0 => ids.push(of.add()),
                    1 if !ids.is_empty() => ids.push(of.fork(any(&mut random, &ids)).unwrap()),
                    2 if ids.len() > 4 => of.free(ids.swap_remove(random.random_range(0..ids.len()))).unwrap(),
                    3 if !ids.is_empty() => {
                        let id = any(&mut random, &ids);
                        let len = random.random_range(0..=of.get(id).unwrap().len);
                        let _ = of.truncate(id, len);
                    }
                    _ => {
                        let batch: Vec<_> = ids.iter().filter(|_| random.random_bool(0.6)).copied().collect();
                        let batch: Vec<_> = batch.into_iter().map(|id| (id, random.random_range(0..20))).collect();
                        let (before, free) = (format!("{:?}", of.sequences), of.free.clone());
                        match of.reserve(&batch) {
                            Ok(reserved) => {
                                copied += reserved.copies.len();
                                of.appended(&batch);
                                for (id, new) in batch.iter().filter(|(_, new)| *new > 0) {
                                    let sequence = of.get(*id).unwrap();
                                    let first = (sequence.len - new) / 16;
                                    let owned = |page: &u32| of.owners[*page as usize] == 1;
                                    assert!(sequence.pages[first..].iter().all(owned), "a shared page is written to");
                                }
                            }
                            Err(_) => {
                                full += 1;
                                assert_eq!((before, &free), (format!("{:?}", of.sequences), &of.free));
                                of.free(ids.swap_remove(random.random_range(0..ids.len()))).unwrap();
                            }
                        }
                    }
                }
                check(&of);
            }
            assert!(full > 50 && copied > 50, "{full} errors, {copied} copies");
        }
    }
}
