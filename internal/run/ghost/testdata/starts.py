"""Starts the program that trains, as commands of frameworks do, and one that does not train."""
import subprocess
import sys

subprocess.run([sys.executable, "-m", "site"], check=True)
assert subprocess.check_output([sys.executable, "-m", "site"]).startswith(b"sys.path = [")
raise SystemExit(subprocess.Popen([sys.executable, "-u", sys.argv[1]]).wait())
