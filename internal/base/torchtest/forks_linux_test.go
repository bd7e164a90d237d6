package torchtest

import (
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
)

func TestForks(t *testing.T) {
	forks := Imported(t, "json", "torch")
	file := filepath.Join(t.TempDir(), "program.py")
	const program = "import sys\nprint(__name__, sys.argv[1:], 'torch' in sys.modules)\n"
	if err := os.WriteFile(file, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	var group sync.WaitGroup
	for range 8 {
		for _, arguments := range [][]string{{file, "a", "b c"}, {"-c", program, "a", "b c"}} {
			group.Go(func() {
				output, err := forks.Output(arguments...)
				if want := "__main__ ['a', 'b c'] True\n"; err != nil || string(output) != want {
					t.Errorf("%q, %v, want %q", output, err, want)
				}
			})
		}
	}
	group.Wait()
}

// TestForksAreApart: what a program does to its interpreter, the next one does not see.
func TestForksAreApart(t *testing.T) {
	forks := Imported(t, "json", "torch")
	for range 2 {
		output, err := forks.Output("-c", "import torch\nprint(hasattr(torch, 'mine'))\ntorch.mine = 1")
		if err != nil || string(output) != "False\n" {
			t.Errorf("%q, %v", output, err)
		}
	}
}

func TestForkThatFails(t *testing.T) {
	forks := Imported(t, "json", "torch")
	for program, want := range map[string]string{
		"import sys; print('so far'); sys.exit(3)":                                `exit status "3"`,
		"print('so far'); raise ValueError('of the program')":                     "ValueError: of the program",
		"import os; print('so far', flush=True); os.abort()":                      `exit status "-6"`,
		"import sys; print('so far'); print('on stderr', file=sys.stderr); 1 / 0": "on stderr",
	} {
		output, err := forks.Output("-c", program)
		if err == nil || !strings.Contains(err.Error(), want) || string(output) != "so far\n" {
			t.Errorf("%s: %q, %v, want %q", program, output, err, want)
		}
	}
}

// TestForkStartsProcesses: a program can have its own children, with fresh interpreters or by fork.
func TestForkStartsProcesses(t *testing.T) {
	file := filepath.Join(t.TempDir(), "program.py")
	const program = `
import multiprocessing
def square(x):
    return x * x
if __name__ == "__main__":
    for method in "spawn", "fork":
        with multiprocessing.get_context(method).Pool(2) as pool:
            print(pool.map(square, [1, 2, 3]))
`
	if err := os.WriteFile(file, []byte(program), 0o600); err != nil {
		t.Fatal(err)
	}
	output, err := Imported(t, "json", "torch").Output(file)
	if want := "[1, 4, 9]\n[1, 4, 9]\n"; err != nil || string(output) != want {
		t.Errorf("%q, %v", output, err)
	}
}
