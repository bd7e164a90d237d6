package torchtest

import (
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"plimsoll/internal/base/files/filestest"
)

// Forks runs Python programs in forks of one interpreter that has imported modules. All test processes of this user,
// Python and preloaded.py share it: they pay for the imports once, where each new interpreter takes some seconds.
type Forks struct {
	interpreter, script string
	base                *Forks // whose interpreter is forked for this one, or nil
	modules             []string
	idle                time.Duration // how long the interpreter waits for its next lease
	lease               *net.UnixConn // to the end of this process
}

// betweenProcesses is how long interpreters wait for the next test process, which may first have to be built.
const betweenProcesses = 10 * time.Second

// preloaded is the server. The test processes of all packages begin in the folder of their package.
var preloaded = filepath.Join(filestest.Root(), "python", "tests", "preloaded.py")

var (
	leased      = map[string]*Forks{} // by name
	leasedMutex sync.Mutex
)

// Imported returns the interpreter that has imported torch and modules. It is missing as that of Python is. A module
// that reads the environment when it is imported reads that of the test that asks first.
func Imported(t testing.TB, modules ...string) *Forks {
	t.Helper()
	var packages []string
	for _, module := range modules {
		name, _, _ := strings.Cut(module, ".")
		packages = append(packages, name)
	}
	base := Forks{interpreter: Python(t, packages...), script: preloaded, modules: []string{"torch"},
		idle: betweenProcesses}
	forks := base
	forks.base, forks.modules = &base, modules
	leasedMutex.Lock()
	defer leasedMutex.Unlock()
	name := forks.name()
	if leased[name] == nil {
		if err := forks.keep(); err != nil {
			t.Fatal(err)
		}
		leased[name] = &forks
	}
	return leased[name]
}

// name is the address of the interpreter. Whoever has the same name may share it.
func (f *Forks) name() string {
	text, _ := os.ReadFile(f.script) // without it the interpreter does not start
	sum := sha256.New()
	fmt.Fprintf(sum, "%d %q %q %q %v", os.Getuid(), f.interpreter, text, f.modules, f.idle)
	if f.base != nil {
		fmt.Fprint(sum, f.base.name())
	}
	return fmt.Sprintf("@plimsoll-tests-%x", sum.Sum(nil))
}

// keep takes leases that this process has none of yet, to its end.
func (f *Forks) keep() (err error) {
	if f.base != nil {
		err = f.base.keep()
	}
	if err == nil && f.lease == nil {
		f.lease, err = f.connect()
	}
	return err
}

// connect connects with the interpreter, which it starts where there is none.
func (f *Forks) connect() (*net.UnixConn, error) {
	address := &net.UnixAddr{Name: f.name(), Net: "unixpacket"}
	for {
		listener, taken := net.ListenUnix(address.Net, address)
		connection, err := net.DialUnix(address.Net, nil, address)
		if taken == nil {
			err = errors.Join(err, f.start(listener))
		}
		if err == nil {
			err = greeted(connection)
		}
		if err == nil {
			return connection, nil
		}
		if connection != nil {
			connection.Close()
		}
		isEnd := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.ECONNRESET)
		if isEnd && errors.Is(taken, syscall.EADDRINUSE) {
			continue // that of another process has ended, and its name is free
		}
		if isEnd {
			err = fmt.Errorf("it has ended: %w", err)
		}
		return nil, fmt.Errorf("the interpreter that imports %s: %w", strings.Join(f.modules, ", "), err)
	}
}

// start starts the interpreter, and gives it the listener, where connections wait while it imports.
func (f *Forks) start(listener *net.UnixListener) error {
	file, err := listener.File()
	listener.Close()
	if err != nil {
		return err
	}
	defer file.Close()
	arguments := append([]string{fmt.Sprint(f.idle.Seconds())}, f.modules...)
	if f.base != nil {
		connection, err := f.base.connect()
		if err != nil {
			return err
		}
		defer connection.Close()
		return ask(connection, "serve", arguments, file)
	}
	command := exec.Command(f.interpreter, append([]string{f.script, "serve", "3"}, arguments...)...)
	command.Dir, command.Env, command.ExtraFiles = "/", environment(), []*os.File{file}
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true} // it outlives this process and its terminal
	if err := command.Start(); err != nil {
		return err
	}
	go command.Wait()
	return nil
}

// greeted waits until the interpreter says that its modules are imported.
func greeted(connection *net.UnixConn) error {
	if err := ofThisUser(connection); err != nil {
		return err
	}
	said := make([]byte, 1<<16)
	n, err := connection.Read(said)
	if err == nil && string(said[:n]) != "ready" {
		err = errors.New(string(said[:n]))
	}
	return err
}

// ofThisUser refuses what another user of the machine serves under the same name.
func ofThisUser(connection *net.UnixConn) error {
	raw, err := connection.SyscallConn()
	if err != nil {
		return err
	}
	var peer *unix.Ucred
	if failed := raw.Control(func(descriptor uintptr) {
		peer, err = unix.GetsockoptUcred(int(descriptor), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); failed != nil || err != nil {
		return errors.Join(failed, err)
	}
	if int(peer.Uid) != os.Getuid() {
		return fmt.Errorf("it belongs to user %d", peer.Uid)
	}
	return nil
}

// Output runs a program and returns its standard output. The arguments are what follows the name of the interpreter: a
// file, or -c and a program, and its own arguments. The error of a program that fails has its standard error.
func (f *Forks) Output(arguments ...string) ([]byte, error) {
	connection, err := f.connect()
	if err != nil {
		return nil, err
	}
	defer connection.Close()
	var ours, theirs [2]*os.File // output, errors
	for i := range ours {
		if ours[i], theirs[i], err = os.Pipe(); err != nil {
			return nil, err
		}
		defer ours[i].Close()
		defer theirs[i].Close()
	}
	if err := ask(connection, "run", arguments, theirs[0], theirs[1]); err != nil {
		return nil, err
	}
	var texts [2][]byte
	var group sync.WaitGroup
	for i := range ours {
		theirs[i].Close()
		group.Go(func() { texts[i], _ = io.ReadAll(ours[i]) })
	}
	group.Wait()
	if status, err := io.ReadAll(connection); string(status) != "0" {
		return texts[0], fmt.Errorf("%s: exit status %q, %v\n%s", arguments[0], status, err, texts[1])
	}
	return texts[0], nil
}

// ask asks for a process with the environment and the folder of this one, and with files. Those of a program are
// standard output and standard error.
func ask(connection *net.UnixConn, what string, arguments []string, files ...*os.File) error {
	folder, err := os.Getwd()
	if err != nil {
		return err
	}
	variables := map[string]string{}
	for _, variable := range environment() {
		name, value, _ := strings.Cut(variable, "=")
		variables[name] = value
	}
	request, err := json.Marshal(map[string]any{"arguments": arguments, "environment": variables, "folder": folder})
	if err != nil {
		return err
	}
	body, err := inMemory(request)
	if err != nil {
		return err
	}
	defer body.Close()
	var descriptors []int
	for _, file := range append(files, body) {
		descriptors = append(descriptors, int(file.Fd()))
	}
	_, _, err = connection.WriteMsgUnix([]byte(what), syscall.UnixRights(descriptors...), nil)
	return err
}

// inMemory returns a file that has text. A packet has a size, and an environment none.
func inMemory(text []byte) (*os.File, error) {
	descriptor, err := unix.MemfdCreate("request", unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(descriptor), "request")
	_, err = file.Write(text)
	return file, err
}

// environment is that of this process. Packages of Hugging Face do not look for anything on the network.
func environment() []string { return append(os.Environ(), "HF_HUB_OFFLINE=1") }
