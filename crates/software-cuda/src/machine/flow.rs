//! Reconvergence of divergent lanes at the first instruction that all of their paths reach, which is where hardware reconverges them at the
//! latest.

use super::program::{Instruction, NOWHERE, Op};

/// Sets, for every branch with a guard, the first instruction that all paths from it lead to.
pub fn join(code: &mut [Instruction]) {
    // Basic blocks.
    let mut begins = vec![false; code.len() + 1];
    begins[0] = true;
    for (nth, instruction) in code.iter().enumerate() {
        match instruction.op {
            Op::Branch { to, .. } => {
                begins[to as usize] = true;
                begins[nth + 1] = true;
            }
            Op::Exit => begins[nth + 1] = true,
            _ => {}
        }
    }
    let firsts: Vec<usize> = (0..code.len()).filter(|nth| begins[*nth]).collect();
    let count = firsts.len();
    let block_of = |nth: usize| firsts.partition_point(|first| *first <= nth) - 1;
    let length = code.len();
    let last_of = |block: usize| firsts.get(block + 1).copied().unwrap_or(length) - 1;
    // Successors of each block; block `count` is the end of the program.
    let after: Vec<Vec<usize>> = (0..count)
        .map(|block| {
            let last = last_of(block);
            let goes_on = if last + 1 < code.len() { block_of(last + 1) } else { count };
            match (&code[last].op, code[last].guard) {
                (Op::Branch { to, .. }, None) => vec![block_of(*to as usize)],
                (Op::Branch { to, .. }, Some(_)) => vec![block_of(*to as usize), goes_on],
                (Op::Exit, None) => vec![count],
                (Op::Exit, Some(_)) => vec![count, goes_on],
                _ => vec![goes_on],
            }
        })
        .collect();
    let mut before = vec![Vec::new(); count + 1];
    for (block, after) in after.iter().enumerate() {
        after.iter().for_each(|next| before[*next].push(block));
    }
    // Post-order of the reversed graph from the end.
    let (mut order, mut number) = (Vec::new(), vec![usize::MAX; count + 1]);
    let mut seen = vec![false; count + 1];
    let mut stack = vec![(count, 0)];
    seen[count] = true;
    while let Some((block, nth)) = stack.pop() {
        match before[block].get(nth) {
            Some(next) => {
                stack.push((block, nth + 1));
                if !std::mem::replace(&mut seen[*next], true) {
                    stack.push((*next, 0));
                }
            }
            None => {
                number[block] = order.len();
                order.push(block);
            }
        }
    }
    // Immediate post-dominators (algorithm of Cooper, Harvey and Kennedy).
    let mut joins = vec![usize::MAX; count + 1];
    joins[count] = count;
    let mut changed = true;
    while changed {
        changed = false;
        for block in order.iter().rev().copied().filter(|block| *block != count) {
            let known = after[block].iter().copied().filter(|next| joins[*next] != usize::MAX);
            let join = known.reduce(|mut a, mut b| {
                while a != b {
                    while number[a] < number[b] {
                        a = joins[a];
                    }
                    while number[b] < number[a] {
                        b = joins[b];
                    }
                }
                a
            });
            if let Some(join) = join.filter(|join| joins[block] != *join) {
                joins[block] = join;
                changed = true;
            }
        }
    }
    for block in 0..count {
        let join = firsts.get(joins[block]).map_or(NOWHERE, |first| *first as u32);
        if let Op::Branch { meets, .. } = &mut code[last_of(block)].op {
            *meets = join;
        }
    }
}
