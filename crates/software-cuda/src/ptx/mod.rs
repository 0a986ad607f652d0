//! Parsing of PTX: tokens, then statements with names resolved to registers and labels.

mod lexer;
mod parser;

pub use parser::{
    Address, Base, Class, Function, Guard, Module, Operand, Parameter, Register, Statement, Variable, parse,
};
