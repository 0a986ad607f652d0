//! Losses of a run: `loss.csv` with a row for each step, and their plot `loss.svg`.

use crate::error::Error;
use crate::files::write_atomically;
use burn::tensor::Tensor;
use serde::{Deserialize, Serialize};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

/// Losses of a step. The training loss is that of the step's batch before its update.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Row {
    pub step: usize,
    pub train_loss: Option<f32>,
    pub validation_loss: Option<f32>,
    pub learning_rate: Option<f64>,
}

/// All rows, and the file that they are written to.
pub struct Losses {
    pub rows: Vec<Row>,
    /// Losses that are still on their devices, step by step. Reading each immediately would make the devices wait in every step.
    pending: Vec<Vec<Tensor<1>>>,
    path: PathBuf,
    writer: csv::Writer<File>,
}

impl Losses {
    /// Keeps the rows before `step`, and opens the file for further rows.
    pub fn open(path: &Path, step: usize) -> Result<Self, Error> {
        let rows = if step > 0 { read(path, step)? } else { Vec::new() };
        let mut writer = csv::Writer::from_writer(Vec::new());
        let written = rows.iter().try_for_each(|row| writer.serialize(row)).and_then(|()| Ok(writer.flush()?));
        written.map_err(failure(path))?;
        if rows.is_empty() {
            writer.write_record(["step", "train_loss", "validation_loss", "learning_rate"]).map_err(failure(path))?;
        }
        let kept = writer.into_inner().map_err(|error| Error::io(path)(error.into_error()))?;
        write_atomically(path, &[&kept])?;

        let file = OpenOptions::new().append(true).open(path).map_err(Error::io(path))?;
        let writer = csv::WriterBuilder::new().has_headers(false).from_writer(file);
        Ok(Self { rows, pending: Vec::new(), path: path.to_path_buf(), writer })
    }

    /// Records a step. Its loss, the mean over all devices, is read later.
    pub fn push(&mut self, row: Row, train_losses: Vec<Tensor<1>>) {
        self.rows.push(row);
        self.pending.push(train_losses);
    }

    pub fn num_pending(&self) -> usize {
        self.pending.len()
    }

    /// Reads and writes pending losses.
    pub fn flush(&mut self) -> Result<(), Error> {
        if self.pending.is_empty() {
            return Ok(());
        }
        let pending = std::mem::take(&mut self.pending);
        let start = self.rows.len() - pending.len();
        let devices = pending[0].len();
        let mut sums = vec![0.0; pending.len()];
        for device in 0..devices {
            let losses = Tensor::cat(pending.iter().map(|losses| losses[device].clone()).collect(), 0);
            let losses = losses.try_into_data().map_err(|error| Error::device(&error))?;
            sums.iter_mut().zip(losses.iter::<f32>()).for_each(|(sum, loss)| *sum += loss);
        }
        for (row, sum) in self.rows[start..].iter_mut().zip(sums) {
            row.train_loss = Some(sum / devices as f32);
        }
        for row in start..self.rows.len() {
            self.write(row)?;
        }
        let diverged = self.rows[start..].iter().find(|row| row.train_loss.is_some_and(|loss| !loss.is_finite()));
        match diverged {
            Some(row) => Err(Error::Diverged { step: row.step, loss: row.train_loss.unwrap_or(f32::NAN) }),
            None => Ok(()),
        }
    }

    /// Adds the last row, which has no training loss because no step follows.
    pub fn finish(&mut self, row: Row) -> Result<(), Error> {
        self.flush()?;
        self.rows.push(row);
        self.write(self.rows.len() - 1)
    }

    fn write(&mut self, row: usize) -> Result<(), Error> {
        let result = self.writer.serialize(&self.rows[row]).and_then(|()| Ok(self.writer.flush()?));
        result.map_err(failure(&self.path))
    }

    /// Mean of the last known training losses, at most `count`.
    pub fn recent(&self, count: usize) -> Option<f32> {
        let losses: Vec<f32> = self.rows.iter().rev().filter_map(|row| row.train_loss).take(count).collect();
        (!losses.is_empty()).then(|| losses.iter().sum::<f32>() / losses.len() as f32)
    }
}

fn read(path: &Path, before: usize) -> Result<Vec<Row>, Error> {
    let text = fs::read(path).map_err(Error::io(path))?;
    let rows = csv::Reader::from_reader(&text[..]).into_deserialize::<Row>();
    // A kill can leave an incomplete row at the end. Rows before the checkpoint are complete.
    Ok(rows.map_while(Result::ok).take_while(|row| row.step < before).collect())
}

fn failure(path: &Path) -> impl Fn(csv::Error) -> Error + '_ {
    move |error| Error::io(path)(io::Error::other(error))
}
