//! Text and tokens: `tokenizer.json`, and the chat template of `tokenizer_config.json`.

use crate::error::Error;
use minijinja::{Environment, ErrorKind, context};
use minijinja_contrib::pycompat::unknown_method_callback;
use serde::{Deserialize, Serialize};
use std::fs;
use std::path::{Path, PathBuf};
use tokenizers::Tokenizer;

/// The tokenizer of a model.
pub struct Text {
    /// The library's tokenizer, which also decodes streams.
    pub tokenizer: Tokenizer,
    path: PathBuf,
}

impl Text {
    /// Reads the `tokenizer.json` of a folder.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] and [`Error::Damaged`].
    pub fn of_folder(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("tokenizer.json");
        let bytes = fs::read(&path).map_err(Error::io(&path))?;
        let mut tokenizer = Tokenizer::from_bytes(bytes).map_err(Error::damaged(&path, "tokenizer"))?;
        // Some files cut or fill up texts, as their authors' training did.
        tokenizer.with_truncation(None).map_err(Error::damaged(&path, "tokenizer"))?.with_padding(None);
        Ok(Text { tokenizer, path })
    }

    /// The tokens of a text. `special` adds those that the tokenizer puts around a text, such as one of its beginning; chat templates
    /// write their own.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the tokenizer cannot encode the text.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, Error> {
        let encoding = self.tokenizer.encode(text, special).map_err(Error::damaged(&self.path, "tokenizer"))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of tokens, without special ones.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the tokenizer cannot decode them.
    pub fn decode(&self, tokens: &[u32]) -> Result<String, Error> {
        self.tokenizer.decode(tokens, true).map_err(self.broken())
    }

    /// A function from the library's error to one that names the file.
    pub(crate) fn broken(&self) -> impl FnOnce(tokenizers::Error) -> Error + use<> {
        Error::damaged(&self.path, "tokenizer")
    }
}

/// A message of a chat.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Message {
    /// `system`, `user` or `assistant`.
    pub role: String,
    /// The text.
    pub content: String,
}

/// The template that makes a prompt of a chat.
pub struct ChatTemplate {
    source: String,
    config: TokenizerConfig,
    path: PathBuf,
}

/// `tokenizer_config.json`, as far as templates use it.
#[derive(Default, Deserialize)]
struct TokenizerConfig {
    chat_template: Option<Templates>,
    bos_token: Option<Token>,
    eos_token: Option<Token>,
}

/// One template, or several with names.
#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

/// A template with its name.
#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// A special token: its text, or an object with it.
#[derive(Deserialize)]
#[serde(untagged)]
enum Token {
    Text(String),
    Object { content: String },
}

impl Token {
    fn text(&self) -> &str {
        match self {
            Token::Text(text) | Token::Object { content: text } => text,
        }
    }
}

impl ChatTemplate {
    /// Reads the template of a folder: `chat_template.jinja`, or the one in `tokenizer_config.json`.
    ///
    /// # Errors
    ///
    /// [`Error::Io`] and [`Error::Damaged`], also if there is no template.
    pub fn of_folder(folder: &Path) -> Result<Self, Error> {
        let path = folder.join("tokenizer_config.json");
        let text = fs::read(&path).map_err(Error::io(&path))?;
        let kind = "configuration of a tokenizer";
        let mut config: TokenizerConfig = serde_json::from_slice(&text).map_err(Error::damaged(&path, kind))?;
        let own = folder.join("chat_template.jinja");
        if own.exists() {
            let source = fs::read_to_string(&own).map_err(Error::io(&own))?;
            return Ok(ChatTemplate { source, config, path: own });
        }
        let source = match config.chat_template.take() {
            Some(Templates::One(source)) => Some(source),
            Some(Templates::Named(all)) => {
                all.into_iter().find(|template| template.name == "default").map(|template| template.template)
            }
            None => None,
        };
        let source = source.ok_or_else(|| Error::damaged(&path, kind)("it has no chat_template"))?;
        Ok(ChatTemplate { source, config, path })
    }

    /// The prompt of a chat, up to where the model's answer begins.
    ///
    /// # Errors
    ///
    /// [`Error::Damaged`] if the template cannot be rendered, or refuses the messages.
    pub fn render(&self, messages: &[Message]) -> Result<String, Error> {
        let mut environment = Environment::new();
        // As transformers renders templates, which are written for Python.
        environment.set_trim_blocks(true);
        environment.set_lstrip_blocks(true);
        environment.set_unknown_method_callback(unknown_method_callback);
        environment.add_function("raise_exception", |message: String| -> Result<String, minijinja::Error> {
            Err(minijinja::Error::new(ErrorKind::InvalidOperation, message))
        });
        let token = |token: &Option<Token>| token.as_ref().map_or(String::new(), |token| token.text().to_string());
        let values = context! {
            messages,
            add_generation_prompt => true,
            bos_token => token(&self.config.bos_token),
            eos_token => token(&self.config.eos_token),
        };
        environment.render_str(&self.source, values).map_err(Error::damaged(&self.path, "chat template"))
    }
}
