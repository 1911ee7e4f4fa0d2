"""How the plugin gets into a process: by `terrace run` when torch is imported, beside the user's own start files."""

import re
import site
import subprocess
import sys
import unittest
from pathlib import Path

from programs import PYTHON, TRAINING, Place

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "pytorch"


class Startup(unittest.TestCase):
    def setUp(self):
        self.place = Place()
        self.place.__enter__()
        self.addCleanup(self.place.__exit__)

    def test_a_training_is_tiered_and_its_numbers_are_the_same(self):
        script = self.place.write("train.py", TRAINING)
        plain = self.place.plain([PYTHON, script])
        run = self.place.run([PYTHON, script])
        self.assertEqual((plain.returncode, run.returncode), (0, 0), run.stderr)
        self.assertEqual(plain.stdout.splitlines()[0], run.stdout.splitlines()[0])
        self.assertEqual(plain.stdout.splitlines()[1], "terrace False")
        self.assertEqual(run.stdout.splitlines()[1], "terrace True", run.stderr)
        self.assertIn("terrace: torch: 3 rounds of forward and backward", run.stderr)
        self.assertRegex(run.stderr, r"terrace: HBM peak .*moved [0-9.]+ MiB", "what the daemon saw")
        self.assertEqual(len(run.stdout.splitlines()), 2, "Terrace writes nothing on stdout")

    def test_the_example_prints_the_same_with_its_policy(self):
        plain = self.place.plain([PYTHON, str(EXAMPLE / "train.py")])
        run = self.place.run([PYTHON, str(EXAMPLE / "train.py")], policy=EXAMPLE / "policy.toml")
        self.assertEqual((plain.returncode, run.returncode), (0, 0), run.stderr)
        self.assertEqual(run.stdout, plain.stdout)
        self.assertRegex(run.stderr, r"terrace: torch: 4 rounds of forward and backward, 4 updates; ")
        self.assertRegex(run.stderr, r"moved, both ways: saved tensors [1-9][0-9.]+ MiB, optimizer state [1-9][0-9.]+ MiB, "
                                     r"gradients 0 B, weights 0 B")
        self.assertRegex(run.stderr, r"waited [0-9.]+ s, [0-9.]+% of the time of the steps: [0-9.]+ s for room, ")
        self.assertRegex(run.stderr, r"with [1-9][0-9.]+ MiB more of HBM nothing would have had to leave")

    def test_a_model_larger_than_its_budget_trains_and_the_report_says_where_the_time_went(self):
        script = str(EXAMPLE / "larger_than_hbm.py")
        text = (EXAMPLE / "larger_than_hbm.toml").read_text().replace('"64GiB"', '"{}MiB"\nreserve = "0"')
        # Two thirds of 128 MiB of weights, gradients and state. Clipping looks at all gradients at once.
        for megabytes, arguments in ((85, ["--clip", "1"]),):
            plain = self.place.plain([PYTHON, script, *arguments])
            policy = self.place.write("policy2.toml", text.format(megabytes))
            run = self.place.run([PYTHON, script, *arguments], policy=policy)
            self.assertEqual((plain.returncode, run.returncode), (0, 0), run.stderr)
            self.assertIn("0.125 GiB", plain.stdout)
            self.assertEqual(run.stdout, plain.stdout)
            said = re.search(r"tensors held at most ([0-9.]+) MiB of ([0-9.]+) MiB of HBM", run.stderr)
            self.assertIsNotNone(said, run.stderr)
            self.assertLessEqual(float(said[1]), megabytes, run.stderr)
            self.assertEqual(float(said[2]), megabytes)
            self.assertRegex(run.stderr, r"optimizer state [1-9][0-9.]+ MiB, gradients ([1-9][0-9.]+ MiB|0 B), weights ")
            self.assertRegex(run.stderr, r"% of the time of the steps: .* for optimizer state and gradients")

    def test_a_process_without_torch_is_left_alone(self):
        script = self.place.write("quiet.py", """
            import sys
            print([name for name in sys.modules if name.startswith(("terrace", "torch"))])
            """)
        run = self.place.run([PYTHON, script])
        self.assertEqual((run.stdout, run.stderr), ("[]\n", ""))

    def test_the_users_own_start_files_run_too(self):
        self.place.write("own/sitecustomize.py", "import sys; sys.own = 'site'; print('site', __file__)")
        self.place.write("base/lib/python3.11/site-packages/usercustomize.py", "print('user')")
        script = self.place.write("train.py", "import sys, sitecustomize\nprint(sys.own, sitecustomize.sys.own)\n" + TRAINING)
        run = self.place.run([PYTHON, script], {"PYTHONPATH": str(self.place.path / "own"),
                                                "PYTHONUSERBASE": str(self.place.path / "base")})
        lines = run.stdout.splitlines()
        self.assertIn(f"site {self.place.path / 'own' / 'sitecustomize.py'}", lines, run.stderr)
        if site.ENABLE_USER_SITE:  # not in a virtual environment
            self.assertIn("user", lines)
        self.assertIn("site site", lines)
        self.assertEqual(lines[-1], "terrace True", run.stderr)

    def test_a_start_file_that_fails_is_reported_by_python_as_ever(self):
        self.place.write("own/sitecustomize.py", "raise ValueError('mine')")
        script = self.place.write("train.py", TRAINING)
        run = self.place.run([PYTHON, script], {"PYTHONPATH": str(self.place.path / "own")})
        self.assertIn("ValueError: mine", run.stderr)
        self.assertEqual(run.stdout.splitlines()[-1], "terrace True", run.stderr)

    @unittest.skipIf(sys.prefix != sys.base_prefix, "one in another would not have this one's packages")
    def test_a_virtual_environment(self):
        made = subprocess.run([PYTHON, "-m", "venv", "--system-site-packages", "--without-pip",
                               str(self.place.path / "env")], capture_output=True, text=True, check=False)
        if made.returncode != 0:
            self.skipTest(f"no virtual environments here: {made.stderr}")
        script = self.place.write("train.py", TRAINING)
        run = self.place.run([str(self.place.path / "env" / "bin" / "python"), script])
        self.assertEqual(run.stdout.splitlines()[-1:], ["terrace True"], run.stderr)

    def test_an_isolated_interpreter_is_told_and_an_import_is_enough(self):
        run = self.place.run([PYTHON, "-I", self.place.write("train.py", TRAINING)])
        self.assertEqual(run.stdout.splitlines()[-1], "terrace False")
        self.assertIn("import terrace.torch", run.stderr)
        folder = run.stderr.split('sys.path.append("')[1].split('"')[0]
        script = self.place.write("told.py", f'import sys; sys.path.append("{folder}"); import terrace.torch\n' + TRAINING)
        told = self.place.run([PYTHON, "-I", script])
        self.assertEqual(told.stdout.splitlines()[-1], "terrace True", told.stderr)

    def test_torch_looks_as_it_did(self):
        script = self.place.write("look.py", """
            import torch, sys, importlib.util
            print(type(torch.__spec__.loader).__name__, type(torch.__loader__).__name__)
            print(importlib.util.find_spec("torch") is torch.__spec__, sys.path[-1].endswith("terrace_python"))
            """)
        run = self.place.run([PYTHON, script])
        self.assertEqual(run.stdout, "SourceFileLoader SourceFileLoader\nTrue True\n", run.stderr)

    def test_a_module_of_the_user_with_our_name_is_not_shadowed(self):
        self.place.write("terrace.py", "print('the user has one too')")
        run = self.place.run([PYTHON, self.place.write("train.py", TRAINING + "\nimport terrace\n")])
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("the user has one too", run.stdout)
        self.assertIn("terrace: torch: not loaded", run.stderr)


if __name__ == "__main__":
    unittest.main()
