// Package optimtest finds a Python with PyTorch for tests that hold results
// against PyTorch itself. Only tests import it.
package optimtest

import (
	"os"
	"os/exec"
	"path/filepath"
	"testing"
)

// EnvironmentVariable names a Python interpreter that has torch. It goes before
// any other.
const EnvironmentVariable = "PLIMSOLL_PYTHON"

// Python is an interpreter that can import torch 2 or later and the modules
// named: the one that PLIMSOLL_PYTHON names, else the one that "make python"
// installs, else python3. A test without one is skipped, but fails in CI, and
// where PLIMSOLL_PYTHON is set.
func Python(t testing.TB, modules ...string) string {
	t.Helper()
	named := os.Getenv(EnvironmentVariable)
	for _, interpreter := range candidates(named) {
		out, err := exec.Command(interpreter, append([]string{"-c", check, "torch"}, modules...)...).CombinedOutput()
		if err == nil {
			return interpreter
		}
		t.Logf("%s: %v %s", interpreter, err, out)
	}
	const missing = "there is no Python with torch 2: run make python, or set " + EnvironmentVariable +
		" to an interpreter that has it"
	if named != "" || os.Getenv("CI") == "true" {
		t.Fatal(missing)
	}
	t.Skip(missing)
	return ""
}

// check looks for modules and at torch's version, without the seconds that
// importing torch takes.
const check = `
import importlib.metadata, importlib.util, sys
for name in sys.argv[1:]:
    if importlib.util.find_spec(name) is None:
        sys.exit("it has no " + name)
version = importlib.metadata.version("torch")
if int(version.split(".")[0]) < 2:
    sys.exit("its torch is " + version)
`

func candidates(named string) []string {
	if named != "" {
		return []string{named}
	}
	interpreters := []string{"python3"}
	if cache, err := os.UserCacheDir(); err == nil {
		installed := filepath.Join(cache, "plimsoll", "venv", "bin", "python")
		if _, err := os.Stat(installed); err == nil {
			interpreters = append([]string{installed}, interpreters...)
		}
	}
	return interpreters
}
