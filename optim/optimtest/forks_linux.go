package optimtest

import (
	_ "embed"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"
	"testing"
)

// Forks runs Python programs in forks of one interpreter that has imported modules. A test binary pays for the imports
// once, where each new interpreter takes some seconds.
type Forks struct {
	mutex    sync.Mutex
	requests *net.UnixConn
}

var (
	running      = map[string]*Forks{} // by modules
	runningMutex sync.Mutex
)

//go:embed forks.py
var server string

// Imported returns the interpreter of this test binary that has imported modules, torch among them. It is missing as
// that of Python is.
func Imported(t testing.TB, modules ...string) *Forks {
	t.Helper()
	var packages []string
	for _, module := range modules {
		name, _, _ := strings.Cut(module, ".")
		packages = append(packages, name)
	}
	interpreter := Python(t, packages...)
	runningMutex.Lock()
	defer runningMutex.Unlock()
	key := strings.Join(modules, " ")
	if running[key] == nil {
		forks, err := start(interpreter, modules)
		if err != nil {
			t.Fatal(err)
		}
		running[key] = forks
	}
	return running[key]
}

// start starts an interpreter, which ends when this process does.
func start(interpreter string, modules []string) (*Forks, error) {
	pair, err := syscall.Socketpair(syscall.AF_UNIX, syscall.SOCK_SEQPACKET|syscall.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, err
	}
	ours, theirs := os.NewFile(uintptr(pair[0]), "requests"), os.NewFile(uintptr(pair[1]), "requests of Python")
	defer ours.Close()
	defer theirs.Close()
	connection, err := net.FileConn(ours)
	if err != nil {
		return nil, err
	}
	command := exec.Command(interpreter, append([]string{"-c", server}, modules...)...)
	command.Stderr = os.Stderr
	command.ExtraFiles = []*os.File{theirs}
	command.Env = append(os.Environ(), "HF_HUB_OFFLINE=1")
	return &Forks{requests: connection.(*net.UnixConn)}, command.Start()
}

// Output runs a program and returns its standard output. The arguments are what follows the name of the interpreter: a
// file, or -c and a program, and its own arguments. The error of a program that fails has its standard error.
func (f *Forks) Output(arguments ...string) ([]byte, error) {
	request, err := json.Marshal(arguments)
	if err != nil {
		return nil, err
	}
	var theirs, ours [3]*os.File // output, errors, exit status
	for i := range ours {
		if ours[i], theirs[i], err = os.Pipe(); err != nil {
			return nil, err
		}
		defer ours[i].Close()
		defer theirs[i].Close()
	}
	if err := f.send(request, theirs); err != nil {
		return nil, fmt.Errorf("the interpreter has ended, its imports may have failed: %w", err)
	}
	var texts [3][]byte
	var group sync.WaitGroup
	for i := range ours {
		theirs[i].Close()
		group.Go(func() { texts[i], _ = io.ReadAll(ours[i]) })
	}
	group.Wait()
	if status := string(texts[2]); status != "0" {
		return texts[0], fmt.Errorf("%s: exit status %q\n%s", arguments[0], status, texts[1])
	}
	return texts[0], nil
}

func (f *Forks) send(request []byte, files [3]*os.File) error {
	var descriptors []int
	for _, file := range files {
		descriptors = append(descriptors, int(file.Fd()))
	}
	f.mutex.Lock()
	defer f.mutex.Unlock()
	_, _, err := f.requests.WriteMsgUnix(request, syscall.UnixRights(descriptors...), nil)
	return err
}
