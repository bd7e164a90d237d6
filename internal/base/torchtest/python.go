// Package torchtest finds a Python with PyTorch for tests that hold results
// against PyTorch itself. Only tests import it.
package torchtest

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
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
	interpreter, err := find(strings.Join(modules, " "))
	if err == nil {
		return interpreter
	}
	t.Log(err)
	const missing = "there is no Python with torch 2: run make python, or set " + EnvironmentVariable +
		" to an interpreter that has it"
	if required() {
		t.Fatal(missing)
	}
	t.Skip(missing)
	return ""
}

// required is whether tests may not go without Python.
func required() bool { return os.Getenv(EnvironmentVariable) != "" || os.Getenv("CI") == "true" }

// hasPython is whether there is an interpreter, or must be.
func hasPython() bool {
	_, err := find("")
	return err == nil || required()
}

var found sync.Map // what find has found, by modules

// find returns the first interpreter that has torch and modules, which are separated by blanks.
func find(modules string) (string, error) {
	search, _ := found.LoadOrStore(modules, sync.OnceValues(func() (string, error) {
		var failures []error
		for _, interpreter := range candidates(os.Getenv(EnvironmentVariable)) {
			arguments := append([]string{"-c", check, "torch"}, strings.Fields(modules)...)
			out, err := exec.Command(interpreter, arguments...).CombinedOutput()
			if err == nil {
				return interpreter, nil
			}
			failures = append(failures, fmt.Errorf("%s: %w %s", interpreter, err, out))
		}
		return "", errors.Join(failures...)
	}))
	return search.(func() (string, error))()
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

// versionsOf prints the versions of the packages that answer tests.
const versionsOf = `
import importlib.metadata, json
versions = {}
for name in "torch", "transformers", "peft", "accelerate", "deepspeed", "megatron-core":
    try:
        versions[name] = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        pass
print(json.dumps(versions))
`

var askVersions = sync.OnceValues(func() (map[string]string, error) {
	interpreter, err := find("")
	if err != nil {
		return nil, err
	}
	text, err := exec.Command(interpreter, "-c", versionsOf).Output()
	if err != nil {
		return nil, err
	}
	versions := map[string]string{}
	err = json.Unmarshal(text, &versions)
	return versions, err
})

// versions returns the versions of the packages that answer tests.
func versions(t testing.TB) map[string]string {
	t.Helper()
	versions, err := askVersions()
	if err != nil {
		t.Fatal(err)
	}
	return versions
}

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
