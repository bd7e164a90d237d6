"""Takes as many MiB of the host as its first argument says, and leaves processes behind in sessions of their own."""
import subprocess
import sys
import time

if len(sys.argv) > 2:
    started = subprocess.Popen(["sleep", "600"], start_new_session=True)
    daemon = subprocess.run(["sh", "-c", "setsid sleep 600 >&- 2>&- & echo $!"], stdout=subprocess.PIPE, text=True).stdout
    print(f"{started.pid} {daemon}", flush=True)  # in one write: the test cancels at the first
held = [b"x" * (1 << 20) for _ in range(int(sys.argv[1]))]
time.sleep(600 if len(held) > 100 or sys.argv[-1] == "stays" else 0)
