//go:build linux

package main

import (
	"bytes"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/charmbracelet/x/ansi"
	"golang.org/x/sys/unix"
)

// terminal is a shell with job control on a terminal of its own.
type terminal struct {
	*runningJob
	typed io.Writer
	lock  sync.Mutex
	more  *sync.Cond // something was shown, or the time is over
	over  bool
	shown bytes.Buffer
}

// newTerminal starts the shell, for which $plimsoll is the program.
func newTerminal(t *testing.T) *terminal {
	t.Helper()
	master, err := os.OpenFile("/dev/ptmx", os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Skipf("no terminal: %v", err)
	}
	t.Cleanup(func() { master.Close() })
	number, err := unix.IoctlGetInt(int(master.Fd()), unix.TIOCGPTN)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.IoctlSetPointerInt(int(master.Fd()), unix.TIOCSPTLCK, 0); err != nil {
		t.Fatal(err)
	}
	slave, err := os.OpenFile(fmt.Sprintf("/dev/pts/%d", number), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		t.Fatal(err)
	}
	defer slave.Close()
	s := &terminal{runningJob: newJob(t), typed: master}
	s.more = sync.NewCond(&s.lock)
	shell := exec.Command("sh", "-m")
	// A prompt could come after the echo of what is typed, and before the output of it.
	shell.Env = append(s.command.Env, "plimsoll="+s.command.Path, "PS1=")
	shell.Stdin, shell.Stdout, shell.Stderr = slave, slave, slave
	shell.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	s.command = shell
	s.start(t)
	go func() {
		for part := make([]byte, 1000); ; {
			n, err := master.Read(part)
			s.lock.Lock()
			s.shown.Write(part[:n])
			s.lock.Unlock()
			s.more.Broadcast()
			if err != nil {
				return
			}
		}
	}()
	return s
}

func (s *terminal) text() string {
	s.lock.Lock()
	defer s.lock.Unlock()
	return s.shown.String()
}

// types types something and waits for the terminal to show a text once more. The terminal also shows what is typed,
// so the text must not be part of it.
func (s *terminal) types(t *testing.T, keys, shows string) {
	t.Helper()
	before := strings.Count(s.text(), shows)
	if _, err := io.WriteString(s.typed, keys); err != nil {
		t.Fatal(err)
	}
	s.shows(t, before+1, shows)
}

// shows waits for the terminal to have shown a text that many times.
func (s *terminal) shows(t *testing.T, times int, text string) {
	t.Helper()
	safety := time.AfterFunc(hung, func() {
		s.lock.Lock()
		s.over = true
		s.lock.Unlock()
		s.more.Broadcast()
	})
	defer safety.Stop()
	s.lock.Lock()
	defer s.lock.Unlock()
	for strings.Count(s.shown.String(), text) < times {
		if s.over {
			t.Fatalf("%q is not shown %d times:\n%s", text, times, &s.shown)
		}
		s.more.Wait()
	}
}

const controlZ, controlC, controlD = "\x1a", "\x03", "\x04"

// TestTerminal: a single rank has the terminal exactly while a program started by the shell itself would have it.
//
// The stopped ranks here start nothing. A process that waits for its vfork child to become another program, as sh
// does, cannot be stopped, and nobody learns that the child has stopped.
func TestTerminal(t *testing.T) {
	const answers = "echo answer=$((40+2))\n"
	t.Run("stopped and continued", func(t *testing.T) {
		s := newTerminal(t)
		s.types(t, "$plimsoll run -- sh -c 'echo begin=$((3+4)); exec cat'\n", "begin=7")
		s.types(t, controlZ, "Stopped")
		s.types(t, answers, "answer=42")
		s.types(t, "fg\n", "run --")
		s.types(t, "to the rank\n", "\nto the rank\r\nto the rank")
		s.types(t, controlD+answers, "answer=42")
	})
	t.Run("recorded", func(t *testing.T) {
		s, file := newTerminal(t), filepath.Join(t.TempDir(), "file")
		s.types(t, "$plimsoll run --record "+file+" -- sh -c 'echo begin=$((3+4)); exec cat'\n", "begin=7")
		s.types(t, controlZ, "Stopped")
		s.types(t, answers, "answer=42")
		s.types(t, "fg\n", "run --")
		s.types(t, "to the rank\n", "\nto the rank\r\nto the rank")
		s.types(t, controlD+answers, "answer=42")
		records, _ := recordingOf(t, file)
		if lines := printed(records, 0, "stdout"); strings.Join(lines, ", ") != "begin=7, to the rank" {
			t.Errorf("recorded is %q", lines)
		}
	})
	t.Run("in the background", func(t *testing.T) {
		s := newTerminal(t)
		s.types(t, "$plimsoll run -- sh -c 'echo begin=$((3+4)); sleep 0.2; echo end=$((3+4))' &\n", "end=7")
		s.types(t, "wait; "+answers, "answer=42")
		s.types(t, answers, "answer=42")
	})
	t.Run("continued in the background", func(t *testing.T) {
		s := newTerminal(t)
		s.types(t, "$plimsoll run -- sh -c 'echo begin=$((3+4)); exec sleep 1000'\n", "begin=7")
		s.types(t, controlZ, "Stopped")
		s.types(t, "bg; "+answers, "answer=42")
		s.types(t, "kill %1; wait; "+answers, "answer=42")
	})
	t.Run("several ranks", func(t *testing.T) {
		s, file := newTerminal(t), filepath.Join(t.TempDir(), "file")
		s.types(t, "$plimsoll run --nproc 2 -- sh -c 'echo begin=$((3+4)); until [ -e "+file+
			" ]; do sleep 0.1; done; echo end=$((3+4))'\n", "begin=7")
		s.types(t, controlZ, "Stopped")
		s.types(t, "touch "+file+"; "+answers, "answer=42")
		s.shows(t, 2, "end=7")
		s.types(t, "fg; "+answers, "answer=42")
	})
	t.Run("of another session", func(t *testing.T) {
		s := newTerminal(t)
		s.types(t, "setsid -w $plimsoll run -- sh -c 'echo begin=$((3+4))'\n", "begin=7")
	})
	t.Run("without a shell that could continue it", func(t *testing.T) {
		s := newTerminal(t)
		s.types(t, "exec $plimsoll run -- sh -c 'echo begin=$((3+4)); exec cat'\n", "begin=7")
		s.types(t, controlZ, "^Z")
		s.types(t, "to the rank\n", "\nto the rank")
		s.types(t, controlC, "ended by signal 2")
	})
}

// TestPictureInColor: the picture of a step has colors on a terminal, and none with NO_COLOR.
func TestPictureInColor(t *testing.T) {
	s := newTerminal(t)
	config, err := filepath.Abs("../../examples/config.json")
	if err != nil {
		t.Fatal(err)
	}
	rehearsal := "$plimsoll rehearse --model " + config + " --steps 1 --overlap forward --forward-ms 5; echo exit=$?\n"
	s.types(t, "export TERM=xterm-256color; unset NO_COLOR\n"+rehearsal, "exit=0")
	if !strings.Contains(s.text(), "\x1b[32m█") {
		t.Errorf("the picture has no color:\n%s", s.text())
	}
	before := len(s.text())
	s.types(t, "export NO_COLOR=1\n"+rehearsal, "exit=0")
	if text := s.text()[before:]; strings.Contains(text, "\x1b[32m") || !strings.Contains(text, "trainer          <") {
		t.Errorf("the picture has colors in spite of NO_COLOR:\n%s", text)
	}
}

// TestTerminalWidths: what the program shows keeps within windows of 80 and of 50 columns. The verdict has a color, and
// a progress bar leaves no line.
func TestTerminalWidths(t *testing.T) {
	config, err := filepath.Abs("../../examples/config.json")
	if err != nil {
		t.Fatal(err)
	}
	for _, columns := range []int{80, 50} {
		s := newScreen(t, uint16(columns), 24)
		for command, shows := range map[string]string{
			"plan --model " + config + " --gpu RTX-4090":                    "\x1b[1;30;42mfits\x1b[m: ",
			"rehearse --model " + config + " --steps 2":                     "optimizer steps",
			"bench --parameters 1000 --workers 1 --rounds 1 --checks=false": "adamw, state split",
		} {
			if testing.Short() && columns == 80 && !strings.HasPrefix(command, "plan ") {
				continue // the narrow window is harder
			}
			if text := s.keeps(t, command, columns); !strings.Contains(text, shows) {
				t.Errorf("%q is not shown:\n%s", shows, text)
			}
		}
	}
}

// TestQuickstarts types the commands of the README and of the cookbook into a terminal of 80 columns. Results are one
// screen.
func TestQuickstarts(t *testing.T) {
	t.Chdir("../..")
	s := newScreen(t, 80, 24)
	converted := filepath.Join(t.TempDir(), "converted")
	count := 0
	for _, document := range []string{"README.md", "docs/cookbook.md"} {
		for _, documented := range documentedCommands(t, document) {
			command := strings.ReplaceAll(documented.line, " converted ", " "+converted+" ")
			count++
			if testing.Short() && isLong(command) {
				continue
			}
			text := s.keeps(t, strings.TrimPrefix(command, "plimsoll "), 80)
			lines := strings.Count(text[:strings.LastIndex(text, "code=")], "\n")
			verb := strings.Fields(command)[1]
			if isOne := document == "README.md" || verb == "rehearse" || verb == "compare"; isOne && lines > 24 &&
				slices.Contains(oneScreen, verb) {
				t.Errorf("%s: %d lines on a terminal of 24:\n%s", command, lines, text)
			}
		}
	}
	if count < 15 {
		t.Errorf("%d commands were found, expected those of the README and of the cookbook", count)
	}
}

// oneScreen are the verbs whose result on a terminal is one screen.
var oneScreen = []string{"plan", "fit", "explain", "rehearse", "compare", "topology"}

// drawnBar is what a progress bar draws: its share, or the time since it began.
var drawnBar = regexp.MustCompile(`\d% \||\[\d+[hms]`)

// keeps runs a command, and checks that each line keeps within the terminal and that no progress bar stays there. It
// returns what the command has shown.
func (s *terminal) keeps(t *testing.T, command string, columns int) string {
	t.Helper()
	before := len(s.text())
	s.types(t, "export LANG=C.UTF-8; unset LC_ALL COLUMNS; $plimsoll "+command+"; echo code=$((40+2))\n", "code=42")
	_, text, _ := strings.Cut(s.text()[before:], "echo code=") // the shell breaks what is typed
	_, text, _ = strings.Cut(text, "\n")
	for line := range strings.Lines(text) {
		seen := "" // when all of the line is drawn
		for _, drawn := range strings.Split(strings.TrimRight(line, "\r\n"), "\r") {
			if n := ansi.StringWidth(drawn); n > columns {
				t.Errorf("%s: a line of %d columns on a terminal of %d: %q", command, n, columns, drawn)
			}
			drawn = ansi.Strip(drawn)
			seen = drawn + string([]rune(seen)[min(len([]rune(seen)), len([]rune(drawn))):])
		}
		if drawnBar.MatchString(seen) {
			t.Errorf("%s: a progress bar stays on the terminal: %q", command, seen)
		}
	}
	return text
}
