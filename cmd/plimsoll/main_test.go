//go:build linux

package main

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/rogpeppe/go-internal/testscript"

	"plimsoll/internal/plan/plan"
)

// TestMain makes the program available to the scripts as "plimsoll", and a program that takes memory as
// "touch-memory".
func TestMain(m *testing.M) {
	testscript.Main(withoutProfile{m}, map[string]func(){
		"plimsoll":     main,
		"touch-memory": touchMemory,
		"train-little": trainLittle,
		"leave-state":  leaveState,
	})
}

// withoutProfile runs the tests without the host profile of the user who runs them, and leaves no recording in that
// user's folders. The programs that tests start have the folder that a test gives them.
type withoutProfile struct{ *testing.M }

func (t withoutProfile) Run() int {
	if err := os.Setenv("XDG_CONFIG_HOME", "/nonexistent"); err != nil {
		panic(err)
	}
	state, err := os.MkdirTemp("", "state")
	if err == nil {
		err = os.Setenv("XDG_STATE_HOME", state)
	}
	if err != nil {
		panic(err)
	}
	defer os.RemoveAll(state)
	return t.M.Run()
}

// TestScripts runs the real program. Besides testscript's own commands, a
// script may use
//
//	exits CODE COMMAND...   run a command that must end with an exit code
//	json FILE               check that FILE holds one JSON document
//	narrow FILE             check that no line of a text has more than 80 columns
//	flip FILE BYTE          change a bit of a file
//	road FILE               check that a rehearsal takes the road on which a trainer waits less
//	$HOSTS                  the directory of recorded machines
//	$EXAMPLES               the directory of examples
//	$SNAPSHOTS              the directory of memory snapshots
func TestScripts(t *testing.T) {
	t.Parallel()
	testscript.Run(t, testscript.Params{
		Dir: filepath.Join("testdata", "script"),
		Setup: func(e *testscript.Env) error {
			examples, err := filepath.Abs(filepath.Join("..", "..", "examples"))
			e.Setenv("EXAMPLES", examples)
			e.Setenv("HOSTS", filepath.Join(examples, "machines"))
			e.Setenv("SNAPSHOTS", filepath.Join(examples, "snapshots"))
			return err
		},
		Cmds: map[string]func(ts *testscript.TestScript, negated bool, arguments []string){
			"exits": exits,
			"flip":  flip,
			"road":  road,
			"json": func(ts *testscript.TestScript, _ bool, arguments []string) {
				var document map[string]any
				ts.Check(json.Unmarshal([]byte(ts.ReadFile(arguments[0])), &document))
			},
			"narrow": func(ts *testscript.TestScript, _ bool, arguments []string) {
				for line := range strings.Lines(ts.ReadFile(arguments[0])) {
					if n := utf8.RuneCountInString(line); n > 81 || strings.HasSuffix(line, " \n") {
						ts.Fatalf("a line of %d columns, or with blanks at its end: %q", n-1, line)
					}
				}
			},
		},
	})
}

// program returns the path of the program; touch-memory is beside it. TestMain runs the test binary as the program of
// that name.
func program(t *testing.T) string {
	return filepath.Join(programs(t), "plimsoll")
}

func programs(t *testing.T) string {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	folder := t.TempDir()
	for _, name := range []string{"plimsoll", "touch-memory"} {
		if err := os.Symlink(self, filepath.Join(folder, name)); err != nil {
			t.Fatal(err)
		}
	}
	return folder
}

func flip(ts *testscript.TestScript, _ bool, arguments []string) {
	at, err := strconv.Atoi(arguments[1])
	ts.Check(err)
	text := []byte(ts.ReadFile(arguments[0]))
	text[at] ^= 1
	ts.Check(os.WriteFile(ts.MkAbs(arguments[0]), text, 0o644))
}

func road(ts *testscript.TestScript, _ bool, arguments []string) {
	var rehearsal struct {
		Taken string `json:"road"`
		Roads []struct {
			Road      string
			Exposed   float64  `json:"exposed_seconds"`
			Rehearsed *float64 `json:"rehearsed_exposed_seconds"` // of the mode that was asked for
		}
	}
	ts.Check(json.Unmarshal([]byte(ts.ReadFile(arguments[0])), &rehearsal))
	exposed := map[string]float64{}
	for _, r := range rehearsal.Roads {
		if r.Rehearsed != nil || r.Road == plan.CPURoad {
			exposed[r.Road] = r.Exposed
		}
	}
	taken, known := exposed[rehearsal.Taken]
	if !known || len(exposed) != 2 {
		ts.Fatalf("%q is taken of %v", rehearsal.Taken, exposed)
	}
	for other, seconds := range exposed {
		if seconds < taken {
			ts.Fatalf("%s is taken, but a trainer waits less with %s: %v", rehearsal.Taken, other, exposed)
		}
	}
}

func exits(ts *testscript.TestScript, _ bool, arguments []string) {
	want, err := strconv.Atoi(arguments[0])
	ts.Check(err)
	got := 0
	if err := ts.Exec(arguments[1], arguments[2:]...); err != nil {
		var exit *exec.ExitError
		if !errors.As(err, &exit) {
			ts.Fatalf("%v", err)
		}
		got = exit.ExitCode()
	}
	if got != want {
		ts.Fatalf("exit code %d, want %d\n%s", got, want, ts.ReadFile("stderr"))
	}
	if text := ts.ReadFile("stdout"); isScreen(arguments[1:]) && strings.Count(text, "\n") > 24 {
		ts.Fatalf("%v: the text is longer than a screen of 24 lines:\n%s", arguments, text)
	}
}

// isScreen reports whether a command is an explanation whose text must be one screen: no flag asks for more.
func isScreen(command []string) bool {
	more := regexp.MustCompile(`^--(?:long|top|json|format)`)
	return len(command) > 1 && command[0] == "plimsoll" && command[1] == "explain" &&
		!slices.ContainsFunc(command, more.MatchString)
}
