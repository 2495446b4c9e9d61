"""Run in a process of its own that can import bfcl_eval: grades by the checker of the package."""

import json
import sys

from bfcl_eval.eval_checker.multi_turn_eval.multi_turn_checker import multi_turn_checker

grades = []
for number, (entry, turns) in enumerate(json.load(sys.stdin)):
    # A name of its own for each: the checker keeps instances by model and entry.
    graded = multi_turn_checker(turns, entry["ground_truth"], entry, "", f"model_{number}")
    grades.append(bool(graded["valid"]))
json.dump(grades, sys.stdout)
