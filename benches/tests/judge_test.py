"""Tests judge.py with the numbers of judge.json, as tests/judge.rs tests src/judge.rs: python3 tests/judge_test.py."""

import json
import math
import pathlib
import sys
import unittest

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE.parent))
sys.dont_write_bytecode = True

import judge  # noqa: E402

NUMBERS = json.loads((HERE / "judge.json").read_text())


def number(value):
    """A number, or NaN for null, because JSON has no NaN."""
    return math.nan if value is None else value


class Judge(unittest.TestCase):
    def test_errors_of_blocks(self):
        for case in NUMBERS["errors"]:
            found, right = [number(x) for x in case["found"]], case["right"]
            difference = sum((x - y) ** 2 for x, y in zip(found, right))
            error = judge.error_of_block(difference, sum(y * y for y in right), len(right))
            with self.subTest(case["name"]):
                if case["error"] is None:
                    self.assertTrue(math.isnan(error))
                else:
                    self.assertAlmostEqual(error, case["error"], delta=1e-12)
                for dtype, bound in NUMBERS["bounds"].items():
                    self.assertEqual(judge.BOUNDS[dtype], bound)
                    wanted = "right" if dtype in case["right_in"] else "wrong"
                    self.assertEqual(judge.verdict([error, error], True, bound), wanted)

    def test_blocks(self):
        for case in NUMBERS["blocks"]:
            self.assertEqual([list(block) for block in judge.blocks(case["length"])], case["blocks"])

    def test_what_is_sampled(self):
        for case in NUMBERS["sampled"]:
            sizes = [case[name] for name in ("group", "seq_q", "seq_k", "causal")]
            heads, queries, keys = judge.sampled(*sizes)
            self.assertEqual(heads, case["heads"])
            self.assertEqual([list(block) for block in queries], case["queries"])
            self.assertEqual([list(block) for block in keys], case["keys"])

    def test_verdicts(self):
        for case in NUMBERS["verdicts"]:
            errors = [number(x) for x in case["errors"]]
            found = judge.verdict(errors, case["confirmed"], NUMBERS["verdict_bound"])
            self.assertEqual(found, case["verdict"], case)

    def test_nan_is_the_worst(self):
        self.assertTrue(math.isnan(judge.worst([0.5, math.nan, 0.75])))
        self.assertEqual((judge.worst([0.5, 0.75]), judge.worst([])), (0.75, 0.0))


if __name__ == "__main__":
    unittest.main()
