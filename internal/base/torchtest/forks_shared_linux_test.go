package torchtest

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"
)

// module writes its name to a pipe, which stays open as long as its interpreter and programs.
const module = `import os
pid = os.getpid()
pipe = os.open(os.environ["PIPE"], os.O_WRONLY)
os.write(pipe, f"{__name__}\n".encode())
`

// servers are interpreters without torch that no other test uses. Each ends with its last lease.
type servers struct {
	t      *testing.T
	folder string
	lines  *bufio.Reader // what their modules write
}

func newServers(t *testing.T) *servers {
	t.Helper()
	Python(t) // without one, the test is skipped
	s := &servers{t: t, folder: t.TempDir()}
	for name, more := range map[string]string{"first": "", "second": "", "third": "",
		"fails": "raise ValueError('of the module')", "dies": "os.abort()"} {
		s.write(name+".py", module+more)
	}
	text, err := os.ReadFile(preloaded)
	if err != nil {
		t.Fatal(err)
	}
	s.write("preloaded.py", fmt.Sprintf("%s\n# %s\n", text, s.folder))
	pipe := filepath.Join(s.folder, "pipe")
	if err := syscall.Mkfifo(pipe, 0o600); err != nil {
		t.Fatal(err)
	}
	// To open it does not wait for those that write.
	read, err := os.OpenFile(pipe, os.O_RDONLY|syscall.O_NONBLOCK, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { read.Close() })
	if err := read.SetReadDeadline(time.Now().Add(5 * time.Minute)); err != nil {
		t.Fatal(err)
	}
	s.lines = bufio.NewReader(read)
	t.Setenv("PIPE", pipe)
	t.Setenv("PYTHONPATH", s.folder)
	return s
}

func (s *servers) write(name, text string) {
	s.t.Helper()
	if err := os.WriteFile(filepath.Join(s.folder, name), []byte(text), 0o600); err != nil {
		s.t.Fatal(err)
	}
}

// with returns the interpreter that imports modules.
func (s *servers) with(base *Forks, modules ...string) *Forks {
	s.t.Helper()
	script := filepath.Join(s.folder, "preloaded.py")
	return &Forks{interpreter: Python(s.t), script: script, base: base, modules: modules}
}

// lease takes leases to the end of the test, or to the first call of what it returns.
func (s *servers) lease(f *Forks) (end func()) {
	s.t.Helper()
	if err := f.keep(); err != nil {
		s.t.Fatal(err)
	}
	end = func() {
		f.lease.Close()
		if f.base != nil {
			f.base.lease.Close()
		}
	}
	s.t.Cleanup(end)
	return end
}

// output runs a program that must succeed.
func (s *servers) output(f *Forks, program string) string {
	s.t.Helper()
	output, err := f.Output("-c", program)
	if err != nil {
		s.t.Fatal(err)
	}
	return strings.TrimSpace(string(output))
}

// line reads one that a module or a program has written. There must be an interpreter.
func (s *servers) line() string {
	s.t.Helper()
	line, err := s.lines.ReadString('\n')
	if err != nil {
		s.t.Fatal(err)
	}
	return strings.TrimSpace(line)
}

// ended waits for the end of all interpreters and programs, and expects the modules that they have imported.
func (s *servers) ended(want ...string) {
	s.t.Helper()
	names, err := io.ReadAll(s.lines)
	if err != nil {
		s.t.Fatal("an interpreter or a program goes on: ", err)
	}
	if got := strings.Fields(string(names)); !slices.Equal(got, want) {
		s.t.Errorf("%v were imported, want %v", got, want)
	}
}

// asProcess is the environment variable of a test process that runs what follows in an interpreter.
const asProcess = "PLIMSOLL_TEST_PROGRAM"

// TestProcess is no test: it is a test process that takes a lease, and runs a program where there is one. Then it holds
// the lease until its standard input ends.
func TestProcess(t *testing.T) {
	program, is := os.LookupEnv(asProcess)
	if !is {
		t.Skip("other tests start this process")
	}
	s := &servers{t: t, folder: os.Getenv("PYTHONPATH")}
	f := s.with(nil, "first")
	s.lease(f)
	fmt.Println("leased", s.output(f, program))
	_, _ = io.Copy(io.Discard, os.Stdin)
}

// process starts TestProcess.
func (s *servers) process(program string) (process *exec.Cmd, input io.Closer, lines *bufio.Reader) {
	s.t.Helper()
	executable, err := os.Executable()
	if err != nil {
		s.t.Fatal(err)
	}
	process = exec.Command(executable, "-test.run=^TestProcess$")
	process.Env = append(os.Environ(), asProcess+"="+program)
	process.Stderr = os.Stderr
	in, err := process.StdinPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	out, err := process.StdoutPipe()
	if err != nil {
		s.t.Fatal(err)
	}
	if err := process.Start(); err != nil {
		s.t.Fatal(err)
	}
	s.t.Cleanup(func() { in.Close(); _ = process.Wait() })
	return process, in, bufio.NewReader(out)
}

// TestProcessesShareAnInterpreter: it imports once, and ends with the last of them.
func TestProcessesShareAnInterpreter(t *testing.T) {
	s := newServers(t)
	var inputs []io.Closer
	var said []*bufio.Reader
	for range 3 {
		_, input, lines := s.process("import first; print(first.pid)")
		inputs, said = append(inputs, input), append(said, lines)
	}
	answers := map[string]bool{}
	for _, lines := range said {
		answer, err := lines.ReadString('\n')
		if err != nil || !strings.HasPrefix(answer, "leased ") {
			t.Fatalf("%q, %v", answer, err)
		}
		answers[answer] = true
	}
	if len(answers) != 1 {
		t.Errorf("%v are several interpreters", answers)
	}
	for _, input := range inputs {
		input.Close()
	}
	s.ended("first")
}

// TestInterpretersForkOthers, which import what they have beside it.
func TestInterpretersForkOthers(t *testing.T) {
	s := newServers(t)
	base := s.with(nil, "first")
	var ends []func()
	for _, module := range []string{"second", "third"} {
		f := s.with(base, module)
		ends = append(ends, s.lease(f))
		got := s.output(f, "import sys; print(*sorted({'first', 'second', 'third'} & set(sys.modules)))")
		if got != "first "+module {
			t.Errorf("%s: %s were imported", module, got)
		}
	}
	for _, end := range ends {
		end()
	}
	base.lease.Close()
	s.ended("first", "second", "third")
}

// TestOtherServerOtherInterpreter: one of an older preloaded.py serves no test of the new one.
func TestOtherServerOtherInterpreter(t *testing.T) {
	s := newServers(t)
	end := s.lease(s.with(nil, "first"))
	text, err := os.ReadFile(preloaded)
	if err != nil {
		t.Fatal(err)
	}
	s.write("preloaded.py", string(text)+"# changed in "+s.folder)
	endOther := s.lease(s.with(nil, "first"))
	end()
	endOther()
	s.ended("first", "first")
}

func TestImportsThatFail(t *testing.T) {
	s := newServers(t)
	base := s.with(nil, "first")
	for _, test := range []struct {
		f    *Forks
		want string
	}{
		{s.with(nil, "fails"), "ValueError: of the module"},
		{s.with(base, "fails"), "ValueError: of the module"},
		{s.with(s.with(nil, "fails"), "first"), "ValueError: of the module"},
		{s.with(nil, "absent"), "No module named 'absent'"},
		{s.with(nil, "dies"), "imports dies: it has ended"},
		{s.with(base, "dies"), "imports dies: it has ended"},
		{&Forks{interpreter: "/absent", script: preloaded}, "no such file"},
	} {
		output, err := test.f.Output("-c", "print(1)")
		if err == nil || !strings.Contains(err.Error(), test.want) {
			t.Errorf("%v: %q, %v, want %q", test.f.modules, output, err, test.want)
		}
	}
}

// TestKilledInterpreter: the program that follows has a new one.
func TestKilledInterpreter(t *testing.T) {
	s := newServers(t)
	f := s.with(s.with(nil, "first"), "second")
	end := s.lease(f)
	for _, module := range []string{"first", "second"} {
		killed := s.output(f, "import "+module+", os; print("+module+".pid, flush=True); os.kill("+module+".pid, 9)")
		if next := s.output(f, "import second; print(second.pid)"); module == "second" && next == killed {
			t.Errorf("%s runs a program after its end", next)
		}
	}
	end()
	s.ended("first", "second", "first", "second") // a new one of second's is forked from a new one of first's
}

// TestKilledTestKillsItsProgram, and keeps no interpreter.
func TestKilledTestKillsItsProgram(t *testing.T) {
	s := newServers(t)
	end := s.lease(s.with(nil, "first"))
	process, _, _ := s.process("import first, os, signal; os.write(first.pipe, b'runs\\n'); signal.pause()")
	if got := []string{s.line(), s.line()}; !slices.Equal(got, []string{"first", "runs"}) {
		t.Fatal(got)
	}
	if err := process.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	end()
	s.ended()
}

// TestEnvironmentAndFolder of a program are those of the test that asks.
func TestEnvironmentAndFolder(t *testing.T) {
	s := newServers(t)
	f := s.with(nil, "first")
	s.lease(f)
	long := strings.Repeat("x", 1<<17) // more than a packet
	t.Setenv("LONG", long)
	t.Chdir(s.folder)
	got := s.output(f, "import os; print(os.getcwd(), os.environ['HF_HUB_OFFLINE'], os.environ['LONG'])")
	if want := s.folder + " 1 " + long; got != want {
		t.Errorf("%.200s, want %.200s", got, want)
	}
}
