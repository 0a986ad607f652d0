//! Looks for faults of Burn and CubeCL on a device, and says of each whether it shows there; docs/upstream.md has them all.
//!
//! `cargo run --release -p upstream -- --device flex`, with `--features vulkan` or `--features cuda` for those. Each program
//! runs in a process of its own, since some end it or never end.

mod faults;

use burn::tensor::Device;
use clap::{Parser, ValueEnum};
use faults::{FAULTS, Fault, Look};
use std::fmt::{Display, Formatter, Result as FmtResult};
use std::io::{Read, Seek, SeekFrom};
use std::process::{Command, ExitCode};
use std::time::Duration;
use wait_timeout::ChildExt;

/// Says of each fault whether it shows. Exit code 0: none does; 1: one does; 2: one could not be looked for.
#[derive(Parser)]
#[command(version)]
struct Cli {
    /// The faults to look for [default: all].
    #[arg(value_parser = fault)]
    faults: Vec<&'static Fault>,
    /// Where to compute.
    #[arg(long, default_value = "wgpu")]
    device: DeviceName,
    /// Seconds after which a program is stopped.
    #[arg(long, default_value_t = 180)]
    limit: u64,
    /// Name the faults and do nothing else.
    #[arg(long)]
    list: bool,
    /// Look for one fault in this process.
    #[arg(long, hide = true)]
    here: bool,
}

/// A runtime, on its default device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum DeviceName {
    /// NVIDIA's CUDA, if compiled in.
    Cuda,
    /// SPIR-V through Vulkan, if compiled in.
    Vulkan,
    /// WGSL on any adapter; with the feature `vulkan` SPIR-V.
    Wgpu,
    /// The CPU.
    Flex,
}

/// What came of a program.
enum Finding {
    Shows(String),
    DoesNotShow(String),
    NotApplicable(String),
}

impl Finding {
    /// A fault that shows, or does not, and the numbers.
    fn new(shows: bool, numbers: String) -> Self {
        if shows { Finding::Shows(numbers) } else { Finding::DoesNotShow(numbers) }
    }
}

impl Display for Finding {
    fn fmt(&self, f: &mut Formatter<'_>) -> FmtResult {
        let (verdict, text) = match self {
            Finding::Shows(text) => ("shows", text),
            Finding::DoesNotShow(text) => ("does not show", text),
            Finding::NotApplicable(text) => ("not applicable", text),
        };
        write!(f, "{verdict:<14}  {}", text.split_whitespace().collect::<Vec<_>>().join(" "))
    }
}

fn fault(name: &str) -> Result<&'static Fault, String> {
    let names = || FAULTS.iter().map(|fault| fault.name).collect::<Vec<_>>().join(", ");
    FAULTS.iter().find(|fault| fault.name == name).ok_or_else(|| format!("it must be one of {}", names()))
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    if cli.list {
        FAULTS.iter().for_each(|fault| println!("{:<20}{}", fault.name, fault.what));
        return ExitCode::SUCCESS;
    }
    if cli.here {
        println!("{MARK}{}", look(cli.faults[0], cli.device));
        return ExitCode::SUCCESS;
    }
    let all = if cli.faults.is_empty() { FAULTS.iter().collect() } else { cli.faults };
    let mut worst = 0;
    for fault in all {
        let (line, code) = match in_a_process(fault, cli.device, Duration::from_secs(cli.limit)) {
            Ok(line) => {
                let shows = line.starts_with("shows");
                (line, u8::from(shows))
            }
            Err(why) => (format!("{:<14}  {why}", "no answer"), 2),
        };
        println!("{:<20}{line}", fault.name);
        worst = worst.max(code);
    }
    ExitCode::from(worst)
}

/// What begins the line of a finding: drivers print lines of their own.
const MARK: &str = "finding: ";

fn look(fault: &Fault, name: DeviceName) -> Finding {
    if !fault.devices.contains(&name) {
        return Finding::NotApplicable(format!("it concerns {:?}", fault.devices).to_lowercase());
    }
    let cube = cube_device(name);
    match (&fault.look, cube) {
        (_, Some(Err(error))) => Finding::NotApplicable(error),
        (Look::CubeCl(look), Some(Ok(device))) => look(&device),
        (Look::CubeCl(_), None) => Finding::NotApplicable("it concerns CubeCL".to_string()),
        (Look::Burn(look), Some(Ok(device))) => look(&Device::new(device)),
        (Look::Burn(look), None) => look(&Device::flex()),
    }
}

/// CubeCL's device of this name, if it has one of that kind.
fn cube_device(name: DeviceName) -> Option<Result<cubecl::Device, String>> {
    use cubecl::device::WgpuDeviceKind::DefaultDevice;
    let device = match name {
        DeviceName::Cuda => cubecl::Device::cuda(0),
        DeviceName::Vulkan => cubecl::Device::vulkan(DefaultDevice),
        DeviceName::Wgpu => cubecl::Device::wgpu(DefaultDevice),
        DeviceName::Flex => return None,
    };
    Some(device.map_err(|error| format!("the device does not exist: {error}")))
}

/// Looks for a fault in a process of its own; an error if that did not say what it found.
fn in_a_process(fault: &Fault, device: DeviceName, limit: Duration) -> Result<String, String> {
    let text = |error: std::io::Error| error.to_string();
    let (mut output, mut complaint) = (tempfile::tempfile().map_err(text)?, tempfile::tempfile().map_err(text)?);
    let device = format!("{device:?}").to_lowercase();
    let mut child = Command::new(std::env::current_exe().map_err(text)?)
        .args([fault.name, "--here", "--device", &device])
        .envs(fault.environment.iter().copied())
        .stdout(output.try_clone().map_err(text)?)
        .stderr(complaint.try_clone().map_err(text)?)
        .spawn()
        .map_err(text)?;
    let status = child.wait_timeout(limit).map_err(text)?;
    if status.is_none() {
        // It may just have ended, which is as good.
        let _ = child.kill();
        child.wait().map_err(text)?;
    }
    let output = read(&mut output).map_err(text)?;
    if let Some(finding) = output.lines().find_map(|line| line.strip_prefix(MARK)) {
        return Ok(finding.to_string());
    }
    let complaint = read(&mut complaint).map_err(text)?;
    let last = complaint.lines().rfind(|line| !line.trim().is_empty() && !line.starts_with("note:"));
    let status = status.map_or(format!("over {} s", limit.as_secs()), |status| status.to_string());
    Err(format!("{status}; {}", last.unwrap_or("without a message")))
}

fn read(file: &mut std::fs::File) -> std::io::Result<String> {
    let mut bytes = Vec::new();
    file.seek(SeekFrom::Start(0))?;
    file.read_to_end(&mut bytes)?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

#[cfg(test)]
mod tests {
    use crate::faults::FAULTS;

    /// The page shows the programs that are compiled here.
    #[test]
    fn the_page_has_every_program() {
        let page = include_str!("../../../docs/upstream.md");
        for fault in FAULTS {
            let heading = format!("\n## {}: ", fault.name);
            assert_eq!(page.matches(&heading).count(), 1, "docs/upstream.md must have one section{heading}");
            assert!(page.contains(fault.program.trim()), "docs/upstream.md must show the program of {}", fault.name);
        }
    }
}
