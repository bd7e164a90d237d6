//go:build linux

package main

import (
	"io"
	"os"
	"path/filepath"
	"regexp"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
)

// What a terminal is told when a view begins and when it ends.
const viewBegins, viewEnds = "\x1b[?1049h", "\x1b[?1049l"

// newScreen is a terminal of a size that can draw.
func newScreen(t *testing.T, columns, rows uint16) *terminal {
	t.Helper()
	s := newTerminal(t)
	s.resize(t, columns, rows)
	s.types(t, "export TERM=xterm-256color; unset NO_COLOR; echo ready=$((3+4))\n", "ready=7")
	return s
}

func (s *terminal) resize(t *testing.T, columns, rows uint16) {
	t.Helper()
	size := &unix.Winsize{Col: columns, Row: rows}
	if err := unix.IoctlSetWinsize(int(s.typed.(*os.File).Fd()), unix.TIOCSWINSZ, size); err != nil {
		t.Fatal(err)
	}
}

// isRestored runs a command of the shell on the terminal, and checks that the terminal shows what is typed.
func (s *terminal) isRestored(t *testing.T) {
	t.Helper()
	s.types(t, "stty -a | tr ';' ' '; echo code=$((40+2))\n", "code=42")
	text := s.text()
	if begun, ended := strings.Count(text, viewBegins), strings.Count(text, viewEnds); begun != ended || begun == 0 {
		t.Errorf("the view has begun %d times, and ended %d times", begun, ended)
	}
	if after := text[strings.LastIndex(text, viewEnds):]; !regexp.MustCompile(`\sicanon\s`).MatchString(after) ||
		!regexp.MustCompile(`\sisig\s`).MatchString(after) {
		t.Errorf("the terminal is not as it was:\n%s", after)
	}
}

// patient is a job that prints a line when it begins, and another when it is asked to end.
const patient = `sh -c 'trap "echo asked=$((5+5)); exit 7" INT TERM; echo begin=$((3+4)); ` +
	`while :; do sleep 0.05; done'`

// TestWatchedJob runs jobs with a view.
func TestWatchedJob(t *testing.T) {
	t.Parallel()
	const run = "$plimsoll run --watch --interval 100ms --nproc 2 -- " + patient + "; echo exit=$?\n"
	t.Run("to its end", func(t *testing.T) {
		s := newScreen(t, 80, 24)
		s.types(t, "$plimsoll run --watch --interval 100ms --nproc 2 -- sh -c 'echo in=$((6*7)); sleep 0.7; "+
			"echo error=$((6*7)) >&2; exit 3'; echo exit=$?\n", "exit=3")
		after := s.text()[strings.LastIndex(s.text(), viewEnds):]
		for _, line := range []string{"[rank 0] in=42", "error=42", "plimsoll: rank"} {
			if !strings.Contains(after, line) {
				t.Errorf("%q is not printed after the view:\n%s", line, after)
			}
		}
		s.isRestored(t)
	})
	t.Run("interrupted", func(t *testing.T) {
		s := newScreen(t, 80, 24)
		s.types(t, run, "begin=7")
		s.types(t, controlC, "exit=7")
		s.shows(t, 1, "asked=10")
		s.isRestored(t)
	})
	t.Run("asked to end", func(t *testing.T) {
		s := newScreen(t, 80, 24)
		s.types(t, run, "begin=7")
		if err := syscall.Kill(s.guard(t), syscall.SIGTERM); err != nil {
			t.Fatal(err)
		}
		s.shows(t, 1, "exit=7")
		s.isRestored(t)
	})
	t.Run("stopped and continued", func(t *testing.T) {
		s := newScreen(t, 80, 24)
		s.types(t, run, "begin=7")
		s.types(t, controlZ, "Stopped")
		s.isRestored(t)
		s.types(t, "fg\n", viewBegins)
		s.types(t, controlC, "asked=10")
		s.shows(t, 2, viewEnds) // until then the view reads what is typed
		s.isRestored(t)
	})
	t.Run("in the background", func(t *testing.T) {
		s := newScreen(t, 80, 24)
		s.types(t, "$plimsoll run --watch -- sh -c 'echo in=$((6*7)); sleep 0.5; echo end=$((6*7))' &\n", "end=42")
		s.types(t, "wait; echo code=$((40+2))\n", "code=42")
		if strings.Contains(s.text(), viewBegins) {
			t.Error("a job in the background has a view")
		}
	})
}

// guard returns the process that the shell has started as plimsoll run.
func (s *terminal) guard(t *testing.T) int {
	t.Helper()
	for _, pid := range s.processes(t) {
		command, err := os.ReadFile(filepath.Join("/proc", strconv.Itoa(pid), "cmdline"))
		if err == nil && strings.Contains(string(command), "\x00run\x00--watch\x00") {
			return pid
		}
	}
	t.Fatal("there is no guard")
	return 0
}

// TestViewKeys types keys, and changes the size of the terminal.
func TestViewKeys(t *testing.T) {
	t.Parallel()
	s := newScreen(t, 80, 24)
	s.types(t, "$plimsoll run --watch --interval 100ms -- "+patient+"; echo exit=$?\n", "headroom")
	s.types(t, "?", "leaves the view")
	s.types(t, "l", "begin=7") // the screen draws only what changes
	s.types(t, "l", "history")
	before := s.text()
	s.resize(t, 120, 30)
	s.shows(t, strings.Count(before, "processes")+1, "processes") // a column for which 80 are too few
	if !strings.Contains(before, "\x1b[32m") {
		t.Error("the view has no color")
	}
	printed := strings.Count(s.text(), "begin=7")
	s.types(t, "q", viewEnds)
	s.shows(t, printed+1, "begin=7") // until then the view reads what is typed
	s.types(t, controlC, "exit=7")
	if after := s.text()[strings.LastIndex(s.text(), viewEnds):]; !strings.Contains(after, "begin=7\r\n") ||
		!strings.Contains(after, "asked=10") {
		t.Errorf("the lines of the rank are not printed after the view:\n%s", after)
	}
	s.isRestored(t)
}

// TestViewWithoutColor: NO_COLOR leaves out colors.
func TestViewWithoutColor(t *testing.T) {
	t.Parallel()
	s := newScreen(t, 80, 24)
	s.types(t, "NO_COLOR=1 $plimsoll run --watch -- sleep 0.7; echo exit=$?\n", "exit=0")
	text := s.text()
	if !strings.Contains(text, "headroom") {
		t.Fatalf("nothing was drawn:\n%s", text)
	}
	if color := regexp.MustCompile(`\x1b\[([0-9]+;)*(3[0-7]|9[0-7]|38;[0-9;]+)m`).FindString(text); color != "" {
		t.Errorf("the view has the color %q", color)
	}
}

// TestWatchedJobInPipe: without a terminal, the ranks print as ever, and tables go to stderr.
func TestWatchedJobInPipe(t *testing.T) {
	t.Parallel()
	j := newJob(t, "--watch", "--interval", "200ms", "--", "sh", "-c", "echo out; sleep 1; exit 4")
	j.start(t).ends(t, 4, "headroom")
	if out := j.stdout.String(); out != "out\n" {
		t.Errorf("stdout is %q", out)
	}
	if tables := strings.Count(j.stderr.String(), "headroom"); tables < 2 {
		t.Errorf("%d tables were printed", tables)
	}
	if strings.Contains(j.stderr.String(), "\x1b") {
		t.Error("the tables have escape sequences")
	}
}

// TestRedirectedOutput: what goes to a file is whole, and the view is drawn beside it.
func TestRedirectedOutput(t *testing.T) {
	s, file := newScreen(t, 80, 24), filepath.Join(t.TempDir(), "log")
	s.types(t, "$plimsoll run --watch -- sh -c 'seq 50000; sleep 0.5' > "+file+"; echo exit=$?\n", "exit=0")
	s.isRestored(t)
	log, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	if lines := strings.Count(string(log), "\n"); lines != 50000 || strings.Contains(string(log), "\x1b") {
		t.Errorf("the file has %d lines of 50000", lines)
	}
}

// TestReplay shows a recording at once, as it grows, and on a terminal.
func TestReplay(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "samples.jsonl")
	newJob(t, "--record", file, "--interval", "100ms", "--", "sleep", "0.5").start(t).ends(t, 0, "")
	text, err := os.ReadFile(file)
	if err != nil {
		t.Fatal(err)
	}
	t.Run("on a terminal", func(t *testing.T) {
		s := newScreen(t, 80, 24)
		s.types(t, "$plimsoll watch --replay "+file+"; echo exit=$?\n", "ended with exit code 0")
		s.types(t, "q", "exit=0")
		s.isRestored(t)
		s.types(t, "$plimsoll watch --replay "+file+"; echo exit=$?\n", "ended with exit code 0")
		s.types(t, controlC, "exit=130")
		s.isRestored(t)
	})
	t.Run("as it grows", func(t *testing.T) {
		grown := filepath.Join(t.TempDir(), "samples.jsonl")
		lines := strings.SplitAfter(string(text), "\n")
		if err := os.WriteFile(grown, []byte(lines[0]), 0o600); err != nil {
			t.Fatal(err)
		}
		j := newJob(t)
		j.command.Args = []string{j.command.Path, "watch", "--replay", grown}
		isRead := readsOf(t, grown)
		j.start(t)
		if !isRead() {
			t.Fatal("the recording is not read")
		}
		to, err := os.OpenFile(grown, os.O_WRONLY|os.O_APPEND, 0)
		if err != nil {
			t.Fatal(err)
		}
		defer to.Close()
		if _, err := io.WriteString(to, strings.Join(lines[1:], "")); err != nil {
			t.Fatal(err)
		}
		j.ends(t, 0, "")
		if !strings.Contains(j.stdout.String(), "ended with exit code 0") {
			t.Errorf("the end is not shown:\n%s", j.stdout.String())
		}
	})
}
