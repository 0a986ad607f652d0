//! Reports on made-up results: the contents of charts and tables, and the reasons for missing values.

use attention_bench::report::{self, Allow};
use attention_bench::results::{self, Call, Memory, Moved, Record, TileTiming, Timing};
use std::fs;
use std::path::PathBuf;
use tempfile::TempDir;

/// A temporary directory of results.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Place(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn with<R: Record>(self, name: &str, rows: &[R]) -> Self {
        results::append(&results::path::<R>(self.0.path(), name), rows).unwrap();
        self
    }

    fn write(&self) -> Result<Vec<PathBuf>, String> {
        report::write(self.0.path(), &[], &self.path("report.html"), Some(&self.path("pictures")), Allow::OneCommit)
            .map_err(|error| error.to_string())
    }

    fn page(&self) -> String {
        self.write().unwrap();
        fs::read_to_string(self.path("report.html")).unwrap()
    }

    fn readme(&self, check: bool) -> Result<(), String> {
        report::write_tables(self.0.path(), &self.path("README.md"), check).map_err(|error| error.to_string())
    }

    fn readme_text(&self) -> String {
        fs::read_to_string(self.path("README.md")).unwrap()
    }
}

fn timing(name: &str, pass: &str, seq: usize, ms: Option<f64>) -> Timing {
    Timing {
        run: "r1".into(),
        date: "2026-11-21".into(),
        commit: "abc1234".into(),
        device: "Chip 1".into(),
        runtime: if ["cudnn", "flash2", "matmul", "copy"].contains(&name) { "torch 2.9.1" } else { "cuda" }.into(),
        r#impl: name.into(),
        kernel: if name == "ours" { "portable" } else { "" }.into(),
        pass: pass.into(),
        dtype: "bf16".into(),
        batch: 4,
        heads_q: 8,
        heads_kv: 8,
        seq_q: seq,
        seq_k: seq,
        head_dim: 64,
        causal: true,
        variant: "none".into(),
        median_ms: ms,
        p20_ms: ms.map(|ms| ms * 0.9),
        p80_ms: ms.map(|ms| ms * 1.1),
        tflops: ms.map(|ms| 100.0 / ms),
        peak_bytes: ms.map(|_| 1 << 20),
    }
}

fn call(row: &Timing, note: &str) -> Call {
    Call {
        run: row.run.clone(),
        r#impl: row.r#impl.clone(),
        kernel: row.kernel.clone(),
        pass: row.pass.clone(),
        dtype: row.dtype.clone(),
        batch: row.batch,
        heads_q: row.heads_q,
        heads_kv: row.heads_kv,
        seq_q: row.seq_q,
        seq_k: row.seq_k,
        head_dim: row.head_dim,
        causal: row.causal,
        variant: row.variant.clone(),
        first_call_ms: row.median_ms.map(|ms| ms * 1000.0),
        host_us: row.median_ms.map(|_| 12.0),
        note: note.into(),
        ..Default::default()
    }
}

/// Rows of ours, of composed operations that run out of memory at 4,096, and of a peer in the same run.
fn lengths() -> Vec<Timing> {
    let lengths = [1024, 2048, 4096];
    let mut rows: Vec<_> = lengths.iter().map(|seq| timing("ours", "forward", *seq, Some(*seq as f64 / 1e3))).collect();
    rows.extend(lengths.map(|seq| timing("composed", "forward", seq, (seq < 4096).then_some(seq as f64 / 1e2))));
    rows.extend(lengths.map(|seq| timing("cudnn", "forward", seq, Some(seq as f64 / 2e3))));
    rows
}

fn paper() -> Place {
    let rows = lengths();
    let calls: Vec<Call> =
        rows.iter().map(|row| call(row, if row.median_ms.is_none() { "out of memory" } else { "" })).collect();
    let matmul = Timing { tflops: Some(200.0), ..timing("matmul", "forward", 8192, Some(0.5)) };
    Place::new().with("paper", &rows).with("paper", &calls).with("paper", &[matmul])
}

/// The charts with this title in this view.
fn views<'a>(page: &'a str, title: &str, view: &str) -> Vec<&'a str> {
    let figures = page.split("<figure aria-label=\"").skip(1).map(|part| part.split("</figure>").next().unwrap());
    let titled = figures.filter(|part| part.starts_with(&format!("{title}\">")));
    titled
        .flat_map(|part| part.split("<div class=\"view "))
        .filter(|part| part.starts_with(&format!("{view}\"")))
        .map(|part| part.split("</div>").next().unwrap())
        .collect()
}

fn view<'a>(page: &'a str, title: &str, view: &str) -> &'a str {
    match *views(page, title, view) {
        [one] => one,
        ref all => panic!("there are {} figures {title} in view {view}, expected one", all.len()),
    }
}

/// The lines of a chart with their numbers of points. Each line is drawn in the chart and in the legend.
fn lines(chart: &str) -> Vec<(&str, usize)> {
    let items = chart.split("<li>").skip(1).map(|item| item.split("</li>").next().unwrap());
    let lines: Vec<(&str, usize)> = items
        .map(|item| {
            let (line, values) = item.split_once(": ").unwrap();
            (line.split_once(", ").unwrap().1, values.split("; ").count())
        })
        .collect();
    let points: usize = lines.iter().map(|(_, points)| points).sum();
    assert_eq!(chart.matches("<circle").count(), points + lines.len(), "{chart}");
    assert!(lines.iter().all(|(label, _)| says(chart, label)), "{chart}");
    lines
}

/// Whether a chart contains this text.
fn says(chart: &str, text: &str) -> bool {
    chart.contains(&format!(">\n{text}\n</text>"))
}

/// The colour of our kernels.
const OURS: &str = "#D1490B";

/// Number of shapes of a kind with this colour.
fn shapes(chart: &str, kind: &str, colour: &str) -> usize {
    let start = format!("<{kind} ");
    let shapes = chart.split(&start).skip(1).map(|part| part.split("/>").next().unwrap());
    shapes.filter(|part| part.contains(colour)).count()
}

#[test]
fn a_line_for_each_implementation_in_every_view() {
    let page = paper().page();
    for name in ["rate", "time", "fraction", "peak"] {
        let chart = view(&page, "bf16 [4, 8, s, 64] causal", name);
        assert_eq!(lines(chart), [("ours", 3), ("composed", 2), ("cudnn", 3)], "{name}");
        // Ours is drawn last, on top of the others.
        assert!(chart.rsplit("<circle").next().unwrap().contains(OURS), "{name}");
    }
    let chart = view(&page, "bf16 [4, 8, s, 64] causal", "fraction");
    assert!(chart.contains("<li>forward, ours: 48.8% at 1k; "), "{chart}");
    assert!(says(chart, "percent of the matmul&apos;s TFLOP/s") && says(chart, "sequence length"), "{chart}");
}

#[test]
fn a_missing_time_says_why_and_is_never_drawn() {
    let page = paper().page();
    let chart = view(&page, "bf16 [4, 8, s, 64] causal", "time");
    assert!(says(chart, "composed: out of memory"), "{chart}");
    assert!(page.contains("<li>composed, forward, at sequence length 4k: out of memory</li>"));
    let rows = page.split("id=\"rows\"").nth(1).unwrap();
    let row = rows.split("<tr class=\"\">").find(|row| row.contains("composed") && row.contains("4096")).unwrap();
    assert!(row.contains("<td class=\"number\">–</td><td class=\"reason\">out of memory</td>"), "{row}");

    // Only the call of the same row gives the reason.
    let other = call(&timing("composed", "forward", 2048, None), "out of memory");
    let unsaid = Place::new().with("paper", &lengths()).with("paper", &[other]).page();
    assert!(unsaid.contains("<li>composed, forward, at sequence length 4k: no reason recorded</li>"));
    assert!(!says(&unsaid, "composed: out of memory"));
}

#[test]
fn a_line_stops_where_a_value_is_missing() {
    let mut rows = lengths();
    rows[1] = timing("ours", "forward", 2048, None);
    let page = Place::new().with("paper", &rows).page();
    let chart = view(&page, "bf16 [4, 8, s, 64] causal", "rate");
    // One line in the legend, and two pieces in the chart.
    assert_eq!(shapes(chart, "polyline", OURS), 3, "{chart}");
}

#[test]
fn devices_and_runtimes_are_never_joined() {
    let on = |device: &str, runtime: &str, run: &str, seqs: &[usize]| -> Vec<Timing> {
        let row = |seq: &usize| Timing {
            device: device.into(),
            runtime: runtime.into(),
            run: run.into(),
            ..timing("ours", "forward", *seq, Some(1.0))
        };
        seqs.iter().map(row).collect()
    };
    let page = Place::new()
        .with("paper", &lengths())
        .with("paper", &on("Chip 1", "vulkan", "r2", &[1024, 2048, 4096, 8192]))
        .with("paper", &on("Chip 2", "cuda", "r3", &[512, 1024]))
        .page();
    let charts = views(&page, "bf16 [4, 8, s, 64] causal", "rate");
    let all: Vec<_> = charts.into_iter().map(lines).collect();
    // The peer stays with the first run, in which it was timed.
    assert_eq!(all[0], [("ours", 3), ("composed", 2), ("cudnn", 3)]);
    assert_eq!(all[1..], [vec![("ours", 4)], vec![("ours", 2)]]);
    for title in ["Chip 1, cuda, with torch 2.9.1", "Chip 1, vulkan", "Chip 2, cuda"] {
        assert!(page.contains(&format!("<h3>{title}</h3>")), "{title}");
    }
    // The only product of matrices belongs to another run.
    let other = Timing { run: "r9".into(), ..timing("matmul", "forward", 8192, Some(0.5)) };
    let page = Place::new().with("paper", &lengths()).with("other", &[other]).page();
    assert!(views(&page, "bf16 [4, 8, s, 64] causal", "fraction").is_empty());
    assert!(page.contains("No product of matrices was timed in this run."));
}

#[test]
fn peers_stay_where_a_later_run_measured_the_rest_again() {
    let rows = lengths();
    let again = rows.iter().filter(|row| row.r#impl != "cudnn").map(|row| Timing { run: "r2".into(), ..row.clone() });
    let again: Vec<Timing> = again.collect();
    let page = Place::new().with("paper", &rows).with("paper", &again).page();
    assert_eq!(lines(view(&page, "bf16 [4, 8, s, 64] causal", "rate")).len(), 3);
}

#[test]
fn kernels_have_lines_of_their_own_and_repeated_rows_count_once() {
    let mut rows = lengths();
    rows.extend([1024, 2048].map(|seq| Timing { kernel: "mma".into(), ..timing("ours", "forward", seq, Some(0.25)) }));
    rows.push(timing("ours", "forward", 1024, Some(0.125)));
    let page = Place::new().with("paper", &rows).page();
    let chart = view(&page, "bf16 [4, 8, s, 64] causal", "rate");
    assert_eq!(lines(chart)[..2], [("ours portable", 3), ("ours mma", 2)], "{chart}");
    assert!(chart.contains("<li>forward, ours portable: 800 at 1k; "), "the last of repeated rows must count");
    assert!(shapes(chart, "polyline", OURS) > 20, "the line of the second kernel must be dashed");
}

#[test]
fn studies_of_one_axis_each() {
    let base = timing("ours", "backward", 512, Some(1.0));
    let page = Place::new()
        .with("quick", &[4, 2, 1].map(|batch| Timing { batch, ..base.clone() }))
        .with("quick", &[Timing { heads_q: 2, heads_kv: 2, ..base.clone() }])
        .with("quick", &[Timing { heads_kv: 2, ..base.clone() }])
        .with("quick", &[Timing { head_dim: 128, ..base.clone() }])
        .with("quick", &[Timing { seq_q: 500, seq_k: 500, ..base }])
        .page();
    for (title, points) in [
        ("bf16 [b, 8, 512, 64] causal", 3),
        ("bf16 [4, h, 512, 64] causal", 2),
        ("bf16 [4, 8/h, 512, 64] causal", 2),
        ("bf16 [4, 8, 512, d] causal", 2),
    ] {
        assert_eq!(lines(view(&page, title, "time")), [("ours", points)], "{title}");
    }
    // 500 and 512 are not a study of length.
    assert_eq!(page.matches("<figure ").count(), 4);
}

#[test]
fn lengths_of_one_number_of_tokens_are_a_study() {
    let rows = [512, 1024, 2048].map(|seq| Timing { batch: 4096 / seq, ..timing("ours", "both", seq, Some(1.0)) });
    let page = Place::new().with("paper", &rows).page();
    assert_eq!(lines(view(&page, "bf16 [b, 8, s, 64] causal, b · s = 4096", "rate")), [("ours", 3)]);
}

#[test]
fn calls_are_bars_with_a_dot_for_each_problem() {
    let page = paper().page();
    for (title, median, unit) in
        [("First call", "2,048", "milliseconds"), ("Host time of a launch", "12.0", "microseconds")]
    {
        let chart = view(&page, title, "calls");
        // One rectangle is the background.
        assert_eq!(chart.matches("<rect ").count(), 1 + 3, "{title}");
        assert_eq!(chart.matches("<circle").count(), 8, "{title}");
        assert!(says(chart, median) && says(chart, unit), "{title}");
        assert!(
            chart.contains("<li>forward, ours: ") && chart.contains(" for bf16 [4, 8, 1024, 64] causal; "),
            "{title}"
        );
    }
}

#[test]
fn variants_are_bars_and_a_missing_one_says_why() {
    let of = |name: &str, variant: &str, ms| Timing { variant: variant.into(), ..timing(name, "forward", 4096, ms) };
    let failed = of("cudnn", "bias", None);
    let rows =
        [of("ours", "none", Some(1.0)), of("ours", "bias", Some(2.0)), of("cudnn", "none", Some(0.5)), failed.clone()];
    let page = Place::new().with("variants", &rows).with("variants", &[call(&failed, "not supported: <bias>")]).page();
    let chart = view(&page, "bf16 [4, 8, 4096, 64] causal", "variants");
    assert_eq!((shapes(chart, "rect", OURS), shapes(chart, "rect", "#1A8F5F")), (2, 1));
    assert!(says(chart, "– not supported: &lt;bias&gt;"), "{chart}");
}

fn tile(tile_q: usize, tile_k: usize, shape: &str, ms: Option<f64>) -> TileTiming {
    TileTiming {
        run: "r1".into(),
        device: "Chip 1".into(),
        runtime: "cuda".into(),
        kernel: "portable forward".into(),
        dtype: "f32".into(),
        batch: 4,
        heads_q: 8,
        seq_q: 4096,
        head_dim: 64,
        tile_q,
        tile_k,
        shape: shape.into(),
        median_ms: ms,
        shared_bytes: Some(49152),
        registers: Some(168),
        chosen: ms == Some(1.5),
        note: if ms.is_none() { "too much shared memory".into() } else { String::new() },
        ..Default::default()
    }
}

#[test]
fn a_map_of_tiles_shows_the_best_shape_and_outlines_the_chosen() {
    let rows = [
        tile(32, 32, "a", Some(2.0)),
        tile(64, 32, "a", Some(1.5)),
        tile(64, 32, "b", Some(1.25)),
        tile(64, 64, "a", None),
    ];
    let page = Place::new().with("sweep", &rows).page();
    let chart = view(&page, "Chip 1, cuda: f32 [4, 8, 4096, 64] full", "tiles");
    // Two of three cells have a time, and one is the chosen shape.
    assert_eq!((shapes(chart, "rect", "#F08A4B"), chart.matches("stroke-width=\"3\"").count()), (2, 1), "{chart}");
    assert!(says(chart, "1.25 ms") && !says(chart, "1.50 ms") && says(chart, "–"), "{chart}");
    assert!(page.contains("<summary>All 4 shapes</summary>"));
    assert_eq!(page.matches("<tr class=\"chosen\">").count(), 1);
    assert!(page.contains("<td class=\"number\" data-value=\"168\">168</td>"));
    assert!(page.contains("<td class=\"reason\">– too much shared memory</td>"));
}

#[test]
fn bytes_moved_stand_beside_the_model() {
    let row = |tile_q: usize| Moved {
        device: "Chip 1".into(),
        kernel: "portable dq".into(),
        dtype: "f32".into(),
        batch: 1,
        heads_q: 8,
        seq_q: 4096,
        head_dim: 64,
        tile_q,
        dram_bytes: 3 << 20,
        l2_bytes: (1 << 30) / tile_q as u64,
        model_bytes: (1 << 29) / tile_q as u64,
        ..Default::default()
    };
    let page = Place::new().with("sweep", &[row(32), row(64), row(128)]).page();
    let chart = view(&page, "Chip 1: f32 [1, 8, s, 64] full, sequence 4096", "moved");
    assert_eq!(lines(chart), [("device memory, measured", 3), ("L2, measured", 3), ("IO model", 3)]);
    assert!(chart.contains("<li>portable dq, L2, measured: 32 MiB (2.00 of the model's) at 32; "), "{chart}");
}

#[test]
fn the_page_needs_nothing_else_and_escapes_what_it_is_given() {
    let rows = lengths().into_iter().map(|row| Timing { device: "<b>\"Chip\" & Co".into(), ..row });
    let page = Place::new().with("paper", &rows.collect::<Vec<_>>()).page();
    assert!(page.contains("&lt;b&gt;&quot;Chip&quot; &amp; Co") && !page.contains("<b>"));
    for outside in ["<link", "src=", "@import", "url(", "fetch("] {
        assert!(!page.contains(outside), "{outside}");
    }
    let names = page.matches("href=\"https://arxiv.org/").count() + page.matches("xmlns=\"http://").count();
    assert_eq!(page.matches("http").count(), names);
    assert!(page.contains("prefers-color-scheme: dark"));
}

#[test]
fn pictures_stand_alone() {
    let place = paper();
    let written = place.write().unwrap();
    let names: Vec<_> = written.iter().map(|file| file.file_name().unwrap().to_str().unwrap()).collect();
    assert_eq!(names, ["report.html", "paper-bf16-4-8-s-64-causal-rate.svg", "paper-bf16-4-8-s-64-causal-peak.svg"]);
    let picture = fs::read_to_string(&written[1]).unwrap();
    assert!(picture.starts_with("<svg ") && picture.contains("xmlns=\"http://www.w3.org/2000/svg\""));
    assert_eq!(shapes(&picture, "rect", "#FFFFFF"), 1, "the background must be white");
    for text in ["bf16 [4, 8, s, 64] causal", "Chip 1, cuda, with torch 2.9.1", "ours: abc1234", "forward", "TFLOP/s"] {
        assert!(says(&picture, text), "{text}: {picture}");
    }
    for label in ["ours", "composed", "cudnn", "1k", "2k", "4k", "sequence length"] {
        assert!(says(&picture, label), "{label}: {picture}");
    }
}

#[test]
fn tables_are_stale_until_they_are_written_again() {
    let place = paper().with("paper", &[timing("ours", "backward", 1024, Some(4.0))]);
    let old = "# Title\n\n<!-- results:paper -->\nold\n<!-- /results -->\n\nEnd.\n";
    fs::write(place.path("README.md"), old).unwrap();
    let error = place.readme(true).unwrap_err();
    assert!(
        error.ends_with(
            "README.md is not current: it differs from the results; write it with attention-bench tables or pictures"
        ),
        "{error}"
    );
    assert_eq!(place.readme_text(), old, "a check must not write");

    place.readme(false).unwrap();
    place.readme(true).unwrap();
    let text = place.readme_text();
    assert!(text.starts_with("# Title\n\n<!-- results:paper -->\n") && text.ends_with("<!-- /results -->\n\nEnd.\n"));
    assert!(
        text.contains("\nChip 1, cuda, with torch 2.9.1; commit abc1234, 2026-11-21. TFLOP/s, forward / backward;")
    );
    assert!(text.contains("A product of matrices reaches 200."));
    assert!(text.contains("| [batch, heads, sequence, head_dim] | ours | composed | cudnn | ours ÷ best other |"));
    assert!(text.contains("| bf16 [4, 8, 1024, 64] causal | 97.7 / 25.0 | 9.77 / – | 195 / – | 0.50× / – |"), "{text}");
    assert!(text.contains("| – (out of memory) / – |"), "{text}");

    // After one more measurement the tables are stale again.
    let place = place.with("paper", &[timing("ours", "forward", 1024, Some(0.5))]);
    place.readme(true).unwrap_err();
}

#[test]
fn tables_show_both_orders_of_the_backward_and_the_best_other() {
    let of = |name: &str, ms: f64| timing(name, "backward", 1024, Some(ms));
    let rows =
        [of("ours-fast", 1.0), of("ours", 2.0), of("cudnn", 1.25), of("flash2", 5.0), of("flash2-deterministic", 6.25)];
    let place = Place::new().with("paper", &rows);
    fs::write(place.path("README.md"), "<!-- results:paper -->\n<!-- /results -->").unwrap();
    place.readme(false).unwrap();
    let text = place.readme_text();
    let heads =
        "| ours | ours-fast | cudnn | flash2 | flash2-deterministic | ours ÷ best other | ours-fast ÷ best other |";
    assert!(text.contains(heads), "{text}");
    assert!(text.contains("| 50.0 | 100 | 80.0 | 20.0 | 16.0 | 0.62× | 1.25× |"), "{text}");
}

/// These rows with another commit.
fn at(commit: &str, rows: Vec<Timing>) -> Vec<Timing> {
    rows.into_iter().map(|row| Timing { commit: commit.into(), ..row }).collect()
}

#[test]
fn commits_of_ours_are_not_mixed_in_a_chart() {
    let mut rows = lengths();
    rows[1].commit = "def5678".into();
    let place = Place::new().with("paper", &rows);
    let error = place.write().unwrap_err();
    for word in
        ["paper.csv", "bf16 [4, 8, s, 64] causal", "abc1234 has 2 rows (forward)", "def5678 has 1 rows (forward)"]
    {
        assert!(error.contains(word), "{word}: {error}");
    }
    assert!(!place.path("report.html").exists(), "nothing must be written");
    // With --mixed the chart is written and names the commits.
    let pictures = place.path("pictures");
    report::write(place.0.path(), &[], &place.path("report.html"), Some(&pictures), Allow::Any).unwrap();
    let picture = fs::read_to_string(pictures.join("paper-bf16-4-8-s-64-causal-rate.svg")).unwrap();
    assert!(picture.contains("ours: abc1234 (forward), def5678 (forward)"), "{picture}");

    // Rows of other implementations may be of any commit.
    let mut rows = lengths();
    rows.iter_mut().filter(|row| row.r#impl == "cudnn").for_each(|row| row.commit = "def5678".into());
    Place::new().with("paper", &rows).write().unwrap();
    // Rows of a tree that differs from its commit may not be mixed with rows of the commit.
    Place::new().with("paper", &at("abc1234+", lengths())).write().unwrap();
    let place =
        Place::new().with("paper", &at("abc1234+", lengths())).with("paper", &at("abc1234", lengths()[..2].to_vec()));
    assert!(place.write().unwrap_err().contains("abc1234+ has 1 rows"));
    // Rows that were measured again later are in no chart.
    Place::new().with("paper", &at("old", lengths())).with("paper", &lengths()).write().unwrap();
}

#[test]
fn commits_of_ours_are_not_mixed_in_memory_and_tiles() {
    let memory = |commit: &str, seq: usize| Memory {
        commit: commit.into(),
        r#impl: "ours".into(),
        pass: "both".into(),
        seq_q: seq,
        seq_k: seq,
        peak_bytes: Some(9),
        ..Default::default()
    };
    let error = Place::new().with("paper", &[memory("a", 1), memory("b", 2)]).write().unwrap_err();
    assert!(error.contains("paper-memory.csv") && error.contains("a has 1 rows (both)"), "{error}");
    Place::new().with("paper", &[memory("a", 1), memory("b", 1)]).write().unwrap();

    let [a, b] = ["a", "b"].map(|commit| TileTiming { commit: commit.into(), ..tile(32, 32, commit, Some(1.0)) });
    let error = Place::new().with("sweep", &[a, b]).write().unwrap_err();
    assert!(error.contains("sweep-tiles.csv") && error.contains("b has 1 rows (portable forward)"), "{error}");
}

#[test]
fn documents_take_one_clean_commit_or_say_that_they_do_not() {
    let place = |rows: &[Timing], marker: &str| {
        let place = Place::new().with("paper", rows);
        fs::write(place.path("README.md"), format!("<!-- results:{marker} -->\n<!-- /results -->")).unwrap();
        place
    };
    let mut mixed = lengths();
    mixed.extend(at("def5678", vec![timing("ours", "backward", 1024, Some(4.0))]));
    let error = place(&mixed, "paper").readme(false).unwrap_err();
    for word in
        ["paper.csv", "the table of Chip 1, cuda", "abc1234 has 3 rows (forward)", "def5678 has 1 rows (backward)"]
    {
        assert!(error.contains(word), "{word}: {error}");
    }
    let unclean = at("abc1234+", lengths());
    let error = place(&unclean, "paper").readme(false).unwrap_err();
    assert!(error.contains("abc1234+, a tree that differed from its commit"), "{error}");

    for (rows, commits) in [(&mixed, "(ours: abc1234 (forward), def5678 (backward))"), (&unclean, "(ours: abc1234+)")] {
        let stale = place(rows, "paper stale");
        stale.readme(false).unwrap();
        stale.readme(true).unwrap();
        let text = stale.readme_text();
        assert!(
            text.starts_with("<!-- results:paper stale -->\n") && text.contains("**To be measured again**"),
            "{text}"
        );
        assert!(text.contains(commits), "{text}");
    }
    // The mark `stale` is an error once the rows are of one clean commit.
    let error = place(&lengths(), "paper stale").readme(false).unwrap_err();
    assert!(error.contains("marked as stale"), "{error}");
    place(&lengths(), "paper").readme(false).unwrap();
}

#[test]
fn steps_of_decoding_are_in_gigabytes_a_second() {
    let step = |name: &str, batch: usize, ms: f64| Timing {
        batch,
        heads_kv: 2,
        seq_q: 1,
        seq_k: 1000,
        causal: false,
        ..timing(name, "forward", 1, Some(ms))
    };
    // 4 · (8 · 1 + 2 · 1000) · (64 + 64) numbers of two bytes are 2.056 MB.
    let row = step("ours", 4, 0.5);
    assert!((row.gigabytes_per_second().unwrap() - 4.112).abs() < 1e-3);
    let wider = Timing { variant: "none, head_dim_v 128".into(), ..row.clone() };
    assert!((wider.gigabytes_per_second().unwrap() - 4.112 * 1.5).abs() < 1e-3);
    for other in [
        Timing { seq_q: 17, ..row.clone() },
        Timing { pass: "backward".into(), ..row.clone() },
        Timing { variant: "window 128".into(), ..row.clone() },
        Timing { median_ms: None, ..row.clone() },
        Timing { seq_k: 1, ..row.clone() },
    ] {
        assert_eq!(other.gigabytes_per_second(), None, "{other:?}");
    }

    let rows = [row, step("ours", 8, 0.5), step("cudnn", 4, 0.25)];
    let place = Place::new().with("paper", &rows);
    fs::write(place.path("README.md"), "<!-- results:paper -->\n<!-- /results -->").unwrap();
    place.readme(false).unwrap();
    let text = place.readme_text();
    assert!(text.contains("| bf16 [4, 8/2, 1→1000, 64] full | 4.11 GB/s | 8.22 GB/s | 0.50× |"), "{text}");
    assert!(text.contains("Of up to 16 queries GB/s"), "{text}");
    let page = place.page();
    let chart = view(&page, "bf16 [b, 8/2, 1→1000, 64] full", "rate");
    assert!(chart.contains("<li>forward, ours: 4.11 at 4; 8.22 at 8</li>") && says(chart, "GB/s"), "{chart}");
}

#[test]
fn decoding_is_drawn_over_keys_beside_a_copy() {
    let step = |name: &str, batch: usize, seq_k: usize, rate: f64| {
        let row =
            Timing { batch, heads_kv: 2, seq_q: 1, seq_k, causal: false, ..timing(name, "forward", 1, Some(1.0)) };
        // A call takes so long that it has this rate, in GB/s.
        Timing { median_ms: row.gigabytes_per_second().map(|of_one| of_one / rate), ..row }
    };
    // 2³⁰ numbers of two bytes are read and written in 1 ms: 4,295 GB/s.
    let copy = Timing {
        batch: 1,
        heads_q: 1,
        seq_q: 1 << 23,
        seq_k: 1 << 23,
        head_dim: 128,
        kernel: "2 GiB".into(),
        tflops: None,
        ..timing("copy", "forward", 1, Some(1.0))
    };
    assert!((copy.gigabytes_per_second().unwrap() - 4294.967).abs() < 1e-3);
    assert!(copy.is_roof() && !copy.is_decoding());
    let failed = Timing { median_ms: None, tflops: None, ..step("flash2", 4, 4096, 1.0) };
    let rows = [
        step("ours", 1, 1024, 1200.0),
        step("ours", 1, 4096, 2000.0),
        step("ours", 4, 1024, 3000.0),
        step("ours", 4, 4096, 4400.0),
        step("flash2", 1, 1024, 500.0),
        step("flash2", 1, 4096, 600.0),
        failed.clone(),
    ];
    let calls = [call(&failed, "not supported: so long"), call(&rows[4], "with launches: no graph")];
    let place = Place::new().with("paper", &rows).with("paper", &calls).with("paper", &[copy]);
    let page = place.page();
    let title = "bf16 [b, 8/2, 1→s, 64] full";
    let chart = view(&page, title, "rate");
    let copied = "copy, read and written";
    assert_eq!(
        lines_of_panels(chart),
        [
            "batch 1, ours",
            "batch 1, flash2",
            &format!("batch 1, {copied}"),
            "batch 4, ours",
            &format!("batch 4, {copied}")
        ]
    );
    assert!(chart.contains("<li>batch 4, ours: 3,000 at 1k; 4,400 at 4k</li>"), "{chart}");
    assert!(chart.contains(&format!("<li>batch 4, {copied}: 4,295 at 1k; 4,295 at 4k</li>")), "{chart}");
    assert!(["batch 1", "batch 4", "keys", "GB/s", "1k", "4k"].iter().all(|text| says(chart, text)), "{chart}");
    // Reading alone may be faster than copying. A copy has no line where it is what others are divided by.
    let chart = view(&page, title, "fraction");
    assert!(chart.contains("<li>batch 4, ours: 69.8% at 1k; 102.4% at 4k</li>") && !says(chart, copied), "{chart}");
    assert!(page.contains("<li>flash2, batch 4, at keys 4k: not supported: so long</li>"));
    assert!(place.path("pictures").join("paper-bf16-b-8-2-1-s-64-full-rate.svg").exists());

    fs::write(place.path("README.md"), "<!-- results:paper -->\n<!-- /results -->").unwrap();
    place.readme(false).unwrap();
    let text = place.readme_text();
    assert!(
        text.contains("percent of the rate of a copy of 2 GiB in the same run, 4,295 GB/s read and written."),
        "{text}"
    );
    let row = "| bf16 [1, 8/2, 1→1024, 64] full | 1,200 GB/s, 28% | 500 GB/s, 12% (with launches) |";
    assert!(text.contains(row), "{text}");

    // Without a copy in the run there is no percentage.
    let page = Place::new().with("paper", &rows).page();
    assert!(views(&page, title, "fraction").is_empty() && page.contains("No copy was timed in this run."));
    assert!(!says(view(&page, title, "rate"), copied));
}

/// Panels and labels of the lines of a chart.
fn lines_of_panels(chart: &str) -> Vec<&str> {
    chart.split("<li>").skip(1).map(|item| item.split(": ").next().unwrap()).collect()
}

#[test]
fn peers_timed_in_another_piece_stand_beside_ours_of_their_commit() {
    let mut rows = lengths();
    rows.iter_mut().filter(|row| row.r#impl == "cudnn").for_each(|row| row.run = "r2".into());
    let page = Place::new().with("paper", &rows).page();
    assert_eq!(lines(view(&page, "bf16 [4, 8, s, 64] causal", "rate")).len(), 3);
    // Peers of another commit are in a table of their own.
    rows.iter_mut().filter(|row| row.r#impl == "cudnn").for_each(|row| row.commit = "def5678".into());
    let page = Place::new().with("paper", &rows).page();
    assert_eq!(views(&page, "bf16 [4, 8, s, 64] causal", "rate").len(), 2);
}

#[test]
fn errors_are_one_sentence() {
    let place = paper();
    let readme = |text: &str| {
        fs::write(place.path("README.md"), text).unwrap();
        place.readme(false).unwrap_err()
    };
    assert!(readme("# Title").ends_with("README.md: it has no marker <!-- results:NAME --> for a table"));
    let open = "<!-- results:paper -->\n<!-- results:paper -->\n<!-- /results -->";
    assert!(readme(open).ends_with("README.md: <!-- results:paper --> has no <!-- /results --> after it"));
    let error = readme("<!-- results:other -->\n<!-- /results -->");
    assert!(
        error.starts_with("there are no results ") && error.ends_with("other.csv; check their name and --directory"),
        "{error}"
    );

    let error = Place::new().write().unwrap_err();
    assert!(error.starts_with("there are no results "), "{error}");
    fs::write(place.path("notes.csv"), "day,rain\n1,2\n").unwrap();
    let error = place.write().unwrap_err();
    assert!(error.contains("notes.csv is not a file of results: its first line must be run,date,"), "{error}");
    assert!(!place.path("report.html").exists(), "nothing must be written");
}
