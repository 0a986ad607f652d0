//! Statements of PTX with resolved names: registers to numbers, labels to statements.

use super::lexer::{Token, tokens};
use crate::error::Error;
use std::collections::HashMap;

/// Width of a register.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Class {
    /// One bit.
    Predicate,
    /// Up to 32 bits.
    Word,
    /// 64 bits.
    Long,
}

/// A register of a function. Registers are numbered from 0 within their class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Register {
    /// Its width.
    pub class: Class,
    /// Its number in the class.
    pub index: u32,
}

/// Base of an address.
#[derive(Clone, Debug, PartialEq)]
pub enum Base {
    /// No base.
    Zero,
    /// The value of a register.
    Register(Register),
    /// The address of a variable or parameter.
    Symbol(String),
}

/// A base and an offset from it.
#[derive(Clone, Debug, PartialEq)]
pub struct Address {
    /// The base.
    pub base: Base,
    /// Offset in bytes.
    pub offset: i64,
}

/// An operand.
#[derive(Clone, Debug, PartialEq)]
pub enum Operand {
    /// A register.
    Register(Register),
    /// A negated predicate.
    Negated(Register),
    /// Bits of a number.
    Immediate(u64),
    /// A decimal number, whose bits depend on the width of the instruction.
    Single(f64),
    /// A special register, such as `%tid.x`.
    Special(String),
    /// A variable, parameter or function.
    Symbol(String),
    /// Number of a statement.
    Label(u32),
    /// `[…]`, with coordinates in tensor operations.
    Address(Address, Vec<Operand>),
    /// `{…}`.
    Vector(Vec<Operand>),
    /// `a|b`.
    Pair(Box<Operand>, Box<Operand>),
    /// `_`.
    Sink,
}

/// Predicate that decides whether a statement is executed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Guard {
    /// The predicate's number.
    pub predicate: u32,
    /// Whether the predicate must be false.
    pub negated: bool,
}

/// An instruction.
#[derive(Clone, Debug)]
pub struct Statement {
    /// Line in the text.
    pub line: u32,
    /// Its guard.
    pub guard: Option<Guard>,
    /// The opcode with its modifiers.
    pub opcode: String,
    /// Operands, destinations first.
    pub operands: Vec<Operand>,
}

/// A parameter of a kernel.
#[derive(Clone, Debug)]
pub struct Parameter {
    /// Its name.
    pub name: String,
    /// Offset among all parameters.
    pub offset: usize,
    /// Size in bytes.
    pub size: usize,
}

/// A variable.
#[derive(Clone, Debug)]
pub struct Variable {
    /// `.shared`, `.global`, `.const` or `.local`, without the dot.
    pub space: String,
    /// Alignment in bytes, a power of 2.
    pub name: String,
    /// Size in bytes; 0 if the launch decides it.
    pub align: usize,
    /// Initial contents.
    pub size: usize,
    /// What it holds at first.
    pub bytes: Vec<u8>,
}

/// A kernel.
#[derive(Clone, Debug, Default)]
pub struct Function {
    /// Its name.
    pub name: String,
    /// Its parameters.
    pub parameters: Vec<Parameter>,
    /// Bytes of all parameters.
    pub parameter_bytes: usize,
    /// Variables of the kernel.
    pub variables: Vec<Variable>,
    /// Instructions of the kernel.
    pub statements: Vec<Statement>,
    /// Number of registers of each class: predicates, words, longs.
    pub registers: [u32; 3],
    /// Maximum number of threads of a block, if the kernel states it.
    pub max_threads: Option<u32>,
}

/// Contents of a PTX text.
#[derive(Clone, Debug, Default)]
pub struct Module {
    /// Kernels.
    pub functions: Vec<Function>,
    /// Variables of the module.
    pub variables: Vec<Variable>,
}

/// Parses PTX.
///
/// # Errors
///
/// If the text is not PTX that this parser supports.
pub fn parse(text: &str) -> Result<Module, Error> {
    let mut parser = Parser { tokens: tokens(text), at: 0 };
    parser.module()
}

struct Parser<'a> {
    tokens: Vec<(Token<'a>, u32)>,
    at: usize,
}

/// Names within a pair of braces.
#[derive(Default)]
struct Scope {
    parent: Option<usize>,
    registers: HashMap<String, Register>,
    /// Registers declared by a prefix and a count.
    families: HashMap<String, (Class, u32, u32)>,
    labels: HashMap<String, u32>,
}

/// The function being parsed.
#[derive(Default)]
struct Body {
    function: Function,
    scopes: Vec<Scope>,
    /// Branches whose labels may come later: statement, scope, label.
    branches: Vec<(usize, usize, String)>,
}

impl Body {
    fn declare(&mut self, scope: usize, class: Class, name: &str, count: Option<u32>) {
        let next = &mut self.function.registers[class as usize];
        match count {
            None => {
                self.scopes[scope].registers.insert(name.into(), Register { class, index: *next });
                *next += 1;
            }
            Some(count) => {
                self.scopes[scope].families.insert(name.into(), (class, *next, count));
                *next += count;
            }
        }
    }

    fn register(&self, scope: usize, name: &str) -> Option<Register> {
        let digits = name.len() - name.bytes().rev().take_while(u8::is_ascii_digit).count();
        let mut scope = Some(scope);
        while let Some(nth) = scope {
            let here = &self.scopes[nth];
            if let Some(register) = here.registers.get(name) {
                return Some(*register);
            }
            if let (Some((class, first, count)), Ok(nth)) =
                (here.families.get(&name[..digits]), name[digits..].parse::<u32>())
                && nth < *count
            {
                return Some(Register { class: *class, index: first + nth });
            }
            scope = here.parent;
        }
        None
    }

    fn label(&self, scope: usize, name: &str) -> Option<u32> {
        let mut scope = Some(scope);
        while let Some(nth) = scope {
            if let Some(label) = self.scopes[nth].labels.get(name) {
                return Some(*label);
            }
            scope = self.scopes[nth].parent;
        }
        None
    }
}

impl<'a> Parser<'a> {
    fn line(&self) -> u32 {
        self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |(_, line)| *line)
    }

    fn error<T>(&self, what: impl Into<String>) -> Result<T, Error> {
        Err(Error::Syntax { line: self.line(), what: what.into() })
    }

    fn peek(&self) -> Option<Token<'a>> {
        self.tokens.get(self.at).map(|(token, _)| *token)
    }

    fn peek_word(&self) -> &'a str {
        match self.peek() {
            Some(Token::Word(word)) => word,
            _ => "",
        }
    }

    fn is(&self, mark: char) -> bool {
        self.peek() == Some(Token::Mark(mark))
    }

    fn take(&mut self, mark: char) -> bool {
        let is = self.is(mark);
        self.at += usize::from(is);
        is
    }

    fn expect(&mut self, mark: char) -> Result<(), Error> {
        if self.take(mark) { Ok(()) } else { self.error(format!("`{mark}` expected, not {:?}", self.peek())) }
    }

    fn word(&mut self) -> Result<&'a str, Error> {
        match self.peek() {
            Some(Token::Word(word)) => {
                self.at += 1;
                Ok(word)
            }
            other => self.error(format!("a name expected, not {other:?}")),
        }
    }

    fn number(&mut self) -> Result<usize, Error> {
        let word = self.word()?;
        match integer(word) {
            Some(number) => Ok(number as usize),
            None => self.error(format!("a number expected, not `{word}`")),
        }
    }

    /// Skips the rest of a line.
    fn skip_line(&mut self) {
        let line = self.line();
        while self.at < self.tokens.len() && self.tokens[self.at].1 == line {
            self.at += 1;
        }
    }

    fn skip_braces(&mut self) {
        let mut depth = 0;
        while self.at < self.tokens.len() {
            depth += i32::from(self.is('{')) - i32::from(self.is('}'));
            self.at += 1;
            if depth == 0 {
                return;
            }
        }
    }

    fn module(&mut self) -> Result<Module, Error> {
        let mut module = Module::default();
        while let Some(token) = self.peek() {
            let Token::Word(word) = token else {
                return self.error(format!("a directive expected, not {token:?}"));
            };
            match word {
                ".version" | ".target" | ".address_size" | ".file" | ".loc" | ".pragma" => self.skip_line(),
                ".section" => {
                    self.at += 2;
                    self.skip_braces();
                }
                ".visible" | ".weak" => self.at += 1,
                ".entry" => {
                    self.at += 1;
                    let function = self.function()?;
                    module.functions.push(function);
                }
                ".extern" if matches!(self.tokens.get(self.at + 1), Some((Token::Word(".func"), _))) => {
                    while !self.take(';') && self.at < self.tokens.len() {
                        self.at += 1;
                    }
                }
                ".extern" => self.at += 1,
                // A leftover of the compiler, which has inlined all callees. A `call` is refused.
                ".func" => {
                    while !self.is('{') && !self.is(';') && self.at < self.tokens.len() {
                        self.at += 1;
                    }
                    if self.is('{') { self.skip_braces() } else { self.at += 1 }
                }
                ".shared" | ".global" | ".const" => {
                    let variable = self.variable()?;
                    module.variables.push(variable);
                }
                other => return self.error(format!("`{other}` is not supported")),
            }
        }
        Ok(module)
    }

    /// Parses a variable, from its state space to its semicolon.
    fn variable(&mut self) -> Result<Variable, Error> {
        let space = self.word()?[1..].to_string();
        let (mut align, mut element) = (0, 1);
        while self.peek_word().starts_with('.') {
            match self.word()? {
                ".align" => align = self.number()?,
                ty => element = bytes_of(ty.rsplit('.').next().unwrap_or_default()).unwrap_or(1),
            }
        }
        let name = self.word()?.to_string();
        let (mut size, mut bytes) = (element, Vec::new());
        if self.take('[') {
            size = if self.is(']') { 0 } else { self.number()? * element };
            self.expect(']')?;
        }
        if self.take('=') {
            let braced = self.take('{');
            loop {
                let negative = self.take('-');
                let number = self.word()?;
                let Some(bits) = integer(number).or_else(|| float_bits(number)) else {
                    return self.error(format!("a number expected, not `{number}`"));
                };
                let bits = if negative { bits.wrapping_neg() } else { bits };
                bytes.extend_from_slice(&bits.to_le_bytes()[..element]);
                if !self.take(',') {
                    break;
                }
            }
            if braced {
                self.expect('}')?;
            }
        }
        self.expect(';')?;
        Ok(Variable { space, name, align: align.max(element), size, bytes })
    }

    fn function(&mut self) -> Result<Function, Error> {
        let mut body = Body { scopes: vec![Scope::default()], ..Body::default() };
        body.function.name = self.word()?.to_string();
        if self.take('(') {
            while !self.take(')') {
                self.parameter(&mut body.function)?;
                self.take(',');
            }
        }
        while !self.is('{') {
            match self.word()? {
                ".maxntid" => {
                    let mut threads = 1;
                    loop {
                        threads *= self.number()? as u32;
                        if !self.take(',') {
                            break;
                        }
                    }
                    body.function.max_threads = Some(threads);
                }
                _ => {
                    while matches!(self.peek(), Some(Token::Word(word)) if !word.starts_with('.')) || self.is(',') {
                        self.at += 1;
                    }
                }
            }
        }
        self.expect('{')?;
        self.block(&mut body, 0)?;
        let branches = std::mem::take(&mut body.branches);
        for (statement, scope, label) in branches {
            let line = body.function.statements[statement].line;
            let Some(to) = body.label(scope, &label) else {
                return Err(Error::Syntax { line, what: format!("there is no label `{label}`") });
            };
            body.function.statements[statement].operands = vec![Operand::Label(to)];
        }
        Ok(body.function)
    }

    fn parameter(&mut self, function: &mut Function) -> Result<(), Error> {
        let (mut align, mut element) = (1, 1);
        while self.peek_word().starts_with('.') {
            match self.word()? {
                ".align" => align = self.number()?,
                ".param" | ".ptr" | ".global" | ".shared" | ".const" | ".local" => {}
                ty => element = bytes_of(ty.rsplit('.').next().unwrap_or_default()).unwrap_or(element),
            }
        }
        let name = self.word()?.to_string();
        let mut size = element;
        if self.take('[') {
            size = self.number()? * element;
            self.expect(']')?;
        } else {
            // Here an alignment is that of the memory pointed to.
            align = element;
        }
        let offset = function.parameter_bytes.next_multiple_of(align.max(element));
        function.parameters.push(Parameter { name, offset, size });
        function.parameter_bytes = offset + size;
        Ok(())
    }

    /// Parses statements up to the closing brace.
    fn block(&mut self, body: &mut Body, scope: usize) -> Result<(), Error> {
        loop {
            if self.take('}') {
                return Ok(());
            }
            if self.take('{') {
                body.scopes.push(Scope { parent: Some(scope), ..Scope::default() });
                let inner = body.scopes.len() - 1;
                self.block(body, inner)?;
                continue;
            }
            if self.take(';') {
                continue;
            }
            match self.peek_word() {
                ".reg" => {
                    self.at += 1;
                    self.registers(body, scope)?;
                }
                ".loc" | ".file" => self.skip_line(),
                ".pragma" => {
                    while !self.take(';') {
                        self.at += 1;
                    }
                }
                ".local" | ".shared" => {
                    let variable = self.variable()?;
                    body.function.variables.push(variable);
                }
                "" if !self.is('@') => return self.error(format!("a statement expected, not {:?}", self.peek())),
                word => {
                    if matches!(self.tokens.get(self.at + 1), Some((Token::Mark(':'), _))) {
                        self.at += 2;
                        let here = body.function.statements.len() as u32;
                        body.scopes[scope].labels.insert(word.into(), here);
                    } else {
                        self.statement(body, scope)?;
                    }
                }
            }
        }
    }

    fn registers(&mut self, body: &mut Body, scope: usize) -> Result<(), Error> {
        let ty = self.word()?;
        let class = match ty {
            ".pred" => Class::Predicate,
            _ => match bytes_of(ty.trim_start_matches('.')) {
                Some(8) => Class::Long,
                Some(1..=4) => Class::Word,
                _ => return self.error(format!("registers `{ty}` are not supported")),
            },
        };
        loop {
            let name = self.word()?;
            let mut count = None;
            if self.take('<') {
                count = Some(self.number()? as u32);
                self.expect('>')?;
            }
            body.declare(scope, class, name, count);
            if !self.take(',') {
                return self.expect(';');
            }
        }
    }

    fn statement(&mut self, body: &mut Body, scope: usize) -> Result<(), Error> {
        let line = self.line();
        let mut guard = None;
        if self.take('@') {
            let negated = self.take('!');
            let name = self.word()?;
            match body.register(scope, name) {
                Some(Register { class: Class::Predicate, index }) => guard = Some(Guard { predicate: index, negated }),
                _ => return self.error(format!("`{name}` is no predicate")),
            }
        }
        let opcode = self.word()?.to_string();
        let mut operands = Vec::new();
        if opcode == "bra" || opcode == "bra.uni" {
            let label = self.word()?.to_string();
            body.branches.push((body.function.statements.len(), scope, label));
            self.expect(';')?;
        } else if !self.take(';') {
            loop {
                let operand = self.operand(body, scope)?;
                operands.push(operand);
                if self.take(';') {
                    break;
                }
                self.expect(',')?;
            }
        }
        body.function.statements.push(Statement { line, guard, opcode, operands });
        Ok(())
    }

    fn operand(&mut self, body: &Body, scope: usize) -> Result<Operand, Error> {
        if self.take('{') {
            let vector = self.operands(body, scope, '}')?;
            return Ok(Operand::Vector(vector));
        }
        if self.take('[') {
            let base = match self.simple(body, scope)? {
                Operand::Register(register) => Base::Register(register),
                Operand::Symbol(name) => Base::Symbol(name),
                Operand::Immediate(number) => {
                    let address = Address { base: Base::Zero, offset: number as i64 };
                    self.expect(']')?;
                    return Ok(Operand::Address(address, vec![]));
                }
                other => return self.error(format!("an address cannot count from {other:?}")),
            };
            let mut offset = 0;
            if self.take('+') {
                let negative = self.take('-');
                offset = self.number()? as i64 * if negative { -1 } else { 1 };
            } else if self.take('-') {
                offset = -(self.number()? as i64);
            }
            let mut more = Vec::new();
            if self.take(',') {
                self.expect('{')?;
                more = self.operands(body, scope, '}')?;
            }
            self.expect(']')?;
            return Ok(Operand::Address(Address { base, offset }, more));
        }
        let operand = self.simple(body, scope)?;
        if self.take('|') {
            let second = self.simple(body, scope)?;
            return Ok(Operand::Pair(Box::new(operand), Box::new(second)));
        }
        Ok(operand)
    }

    fn operands(&mut self, body: &Body, scope: usize, close: char) -> Result<Vec<Operand>, Error> {
        let mut operands = Vec::new();
        while !self.take(close) {
            let operand = self.simple(body, scope)?;
            operands.push(operand);
            self.take(',');
        }
        Ok(operands)
    }

    fn simple(&mut self, body: &Body, scope: usize) -> Result<Operand, Error> {
        if self.take('!') {
            let name = self.word()?;
            return match body.register(scope, name) {
                Some(register @ Register { class: Class::Predicate, .. }) => Ok(Operand::Negated(register)),
                _ => self.error(format!("`{name}` is no predicate")),
            };
        }
        let negative = self.take('-');
        let word = self.word()?;
        if word == "_" {
            return Ok(Operand::Sink);
        }
        if word.as_bytes()[0].is_ascii_digit() {
            if let Some(bits) = float_bits(word) {
                return Ok(Operand::Immediate(bits));
            }
            if let Some(bits) = integer(word) {
                return Ok(Operand::Immediate(if negative { bits.wrapping_neg() } else { bits }));
            }
            return match word.parse::<f64>() {
                Ok(number) => Ok(Operand::Single(if negative { -number } else { number })),
                Err(_) => self.error(format!("`{word}` is no number")),
            };
        }
        if let Some(register) = body.register(scope, word) {
            return Ok(Operand::Register(register));
        }
        if word.starts_with('%') {
            return Ok(Operand::Special(word.into()));
        }
        Ok(Operand::Symbol(word.into()))
    }
}

/// Size in bytes of a type, by its name without the dot.
pub fn bytes_of(ty: &str) -> Option<usize> {
    match ty {
        "b8" | "u8" | "s8" => Some(1),
        "b16" | "u16" | "s16" | "f16" | "bf16" => Some(2),
        "b32" | "u32" | "s32" | "f32" | "f16x2" | "bf16x2" | "tf32" => Some(4),
        "b64" | "u64" | "s64" | "f64" => Some(8),
        _ => None,
    }
}

fn integer(word: &str) -> Option<u64> {
    let word = word.strip_suffix('U').unwrap_or(word);
    match word.get(..2) {
        Some("0x" | "0X") => u64::from_str_radix(&word[2..], 16).ok(),
        Some("0b" | "0B") => u64::from_str_radix(&word[2..], 2).ok(),
        _ => word.parse().ok(),
    }
}

/// Bits of `0f…` or `0d…`.
fn float_bits(word: &str) -> Option<u64> {
    match word.get(..2) {
        Some("0f" | "0F" | "0d" | "0D") => u64::from_str_radix(&word[2..], 16).ok(),
        _ => None,
    }
}
