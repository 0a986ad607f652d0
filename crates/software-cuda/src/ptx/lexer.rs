//! Tokens of PTX with their lines.

/// A token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Token<'a> {
    /// A name, an opcode with its modifiers, a directive, or a number.
    Word(&'a str),
    /// Text between quotation marks.
    Text(&'a str),
    /// Any other character.
    Mark(char),
}

/// Tokens of a text, each with its line, counted from 1.
pub fn tokens(text: &str) -> Vec<(Token<'_>, u32)> {
    let bytes = text.as_bytes();
    let (mut at, mut line) = (0, 1u32);
    let mut tokens = Vec::new();
    while at < bytes.len() {
        match bytes[at] {
            b'\n' => {
                line += 1;
                at += 1;
            }
            0 => break,
            byte if byte.is_ascii_whitespace() => at += 1,
            b'/' if bytes[at..].starts_with(b"//") => {
                at += bytes[at..].iter().position(|byte| *byte == b'\n').unwrap_or(bytes.len() - at);
            }
            b'/' if bytes[at..].starts_with(b"/*") => {
                let end = text[at..].find("*/").map_or(bytes.len(), |length| at + length + 2);
                line += bytes[at..end].iter().filter(|byte| **byte == b'\n').count() as u32;
                at = end;
            }
            b'"' => {
                let length = bytes[at + 1..].iter().position(|byte| *byte == b'"').unwrap_or(bytes.len() - at - 1);
                tokens.push((Token::Text(&text[at + 1..at + 1 + length]), line));
                at += length + 2;
            }
            byte if is_of_word(byte) => {
                let begin = at;
                while at < bytes.len() {
                    if is_of_word(bytes[at]) {
                        at += 1;
                    } else if bytes[at..].starts_with(b"::") {
                        at += 2;
                    } else {
                        break;
                    }
                }
                tokens.push((Token::Word(&text[begin..at]), line));
            }
            _ => {
                let mark = text[at..].chars().next().expect("there is one");
                tokens.push((Token::Mark(mark), line));
                at += mark.len_utf8();
            }
        }
    }
    tokens
}

fn is_of_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'_' | b'$' | b'%' | b'.')
}
