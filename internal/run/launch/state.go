//go:build linux

package launch

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"k8s.io/utils/cpuset"

	"plimsoll/internal/machine/binding"
	"plimsoll/internal/run/watch"
	"plimsoll/internal/state/service"
)

// NewService returns the keeper of an optimizer service that listens at a socket. The
// service answers Prometheus at an address, unless that is empty.
type NewService func(socket, metrics string, logf func(format string, values ...any)) (*service.Keeper, error)

// stateService is the optimizer service of a job. It starts when a rank first connects
// to it. Nil means none.
type stateService struct {
	keeper *service.Keeper
	end    context.CancelFunc
	ended  chan struct{}
}

// hasService reports whether the ranks are told of another service.
func (j *Job) hasService() bool {
	told := func(variable string) bool { return strings.HasPrefix(variable, service.SocketVariable+"=") }
	return slices.ContainsFunc(j.Ranks, func(r Rank) bool { return slices.ContainsFunc(r.Environment, told) })
}

// socketDirectory chooses a directory for the job's sockets: that of its optimizer
// service, and that of marks. Both keeper and guard remove it.
func socketDirectory() string {
	parent := socketParent()
	removeDeadDirectories(parent)
	return filepath.Join(parent, fmt.Sprintf("plimsoll-%d-%d", os.Getpid(), rand.Uint32()))
}

// socketParent returns where to create directories of sockets: the first usual place
// where this process can create one, and where other working directories can find it.
func socketParent() string {
	const last, longest = "/tmp", 60 // the path of a socket has at most 107 bytes
	for _, parent := range []string{os.Getenv("XDG_RUNTIME_DIR"), os.Getenv("TMPDIR")} {
		info, err := os.Stat(parent)
		if err == nil && info.IsDir() && filepath.IsAbs(parent) && len(parent) <= longest &&
			unix.Access(parent, unix.W_OK|unix.X_OK) == nil {
			return parent
		}
	}
	return last
}

// removeDeadDirectories removes the directories of jobs whose guard and keeper were
// both killed: no process listens at their sockets. It removes only sockets and empty
// directories, as a directory may only look like one of ours.
func removeDeadDirectories(parent string) {
	directories, _ := filepath.Glob(filepath.Join(parent, "plimsoll-*-*"))
	for _, directory := range directories {
		if !jobDirectory.MatchString(filepath.Base(directory)) {
			continue
		}
		service := isDead(filepath.Join(directory, "socket"), "unixpacket")
		marks := isDead(filepath.Join(directory, marksSocket), "unixgram")
		if service == nil && marks == nil || service == nil && errors.Is(marks, os.ErrNotExist) ||
			marks == nil && errors.Is(service, os.ErrNotExist) {
			removeSocketDirectory(directory) // fails for another user's directory
		}
	}
}

// isListed reports whether the kernel lists a socket among those of this network namespace. A connection would tell it,
// too, but starts the service of the job.
func isListed(name string) bool {
	sockets, _ := fs.ReadFile(os.DirFS("/"), "proc/net/unix")
	return bytes.Contains(sockets, []byte(" "+name+"\n"))
}

// isDead returns nil if a name is that of a socket at which no process listens.
func isDead(name, network string) error {
	info, err := os.Lstat(name)
	switch {
	case err != nil:
		return err
	case info.Mode().Type() != os.ModeSocket:
		return errors.New("it is no socket")
	case time.Since(info.ModTime()) < time.Minute:
		return errors.New("nobody may listen there yet")
	case isListed(name):
		return errors.New("a process listens there")
	}
	c, err := net.Dial(network, name)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return nil
	}
	if err == nil {
		err = errors.Join(errors.New("a process listens there"), c.Close())
	}
	return err
}

var jobDirectory = regexp.MustCompile(`^plimsoll-[0-9]+-[0-9]+$`)

// removeSocketDirectory removes a directory and the sockets in it, as far as they
// exist.
func removeSocketDirectory(directory string) {
	entries, _ := os.ReadDir(directory)
	for _, entry := range entries {
		if entry.Type() == os.ModeSocket {
			_ = os.Remove(filepath.Join(directory, entry.Name()))
		}
	}
	_ = os.Remove(directory)
}

func (j *Job) startState(socket, metrics string, cpus cpuset.CPUSet, newService NewService) (*stateService, error) {
	keeper, err := newService(socket, metrics, j.Logf)
	if err != nil {
		return nil, err
	}
	keeper.Lazy = metrics == "" // Prometheus may ask before the first rank connects
	keeper.Start = func(command *exec.Cmd) error {
		if err := bindThread(cpus, binding.PolicyDefault, nil); err != nil {
			return err
		}
		return startWithScore(command, j.scores.Keeper)
	}
	if err := keeper.Listen(); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(context.Background())
	s := &stateService{keeper: keeper, end: cancel, ended: make(chan struct{})}
	go func() {
		if err := keeper.Run(ctx); err != nil {
			j.Logf("%v", err)
		}
		close(s.ended)
	}()
	return s, nil
}

// variables returns the variables that tell a rank of the service.
func (s *stateService) variables(environment []string) []string {
	if s == nil {
		return nil
	}
	variables := []string{service.SocketVariable + "=" + s.keeper.Socket}
	named := func(variable string) bool { return strings.HasPrefix(variable, watch.JobVariable+"=") }
	if !slices.ContainsFunc(environment, named) {
		variables = append(variables, watch.JobVariable+"="+filepath.Base(filepath.Dir(s.keeper.Socket)))
	}
	return variables
}

// process returns the process ID of the service, or 0 if none runs.
func (s *stateService) process() int {
	if s == nil {
		return 0
	}
	return s.keeper.Process()
}

// stopState ends the service, which finishes the checkpoints that it writes. The
// first signal of the user is told what is waited for, and the second one kills
// the service. So does the end of the guard.
func (j *Job) stopState(s *stateService, signals <-chan os.Signal) {
	if s == nil {
		return
	}
	defer removeSocketDirectory(filepath.Dir(s.keeper.Socket))
	s.end()
	for told := false; ; {
		select {
		case <-s.ended:
			return
		case signal := <-signals:
			switch {
			case signal != syscall.SIGINT && signal != syscall.SIGTERM:
			case told:
				s.keeper.Kill()
			default:
				j.Logf("%v: the optimizer service finishes its checkpoints first; a second signal kills it", signal)
				told = true
			}
		case <-j.lost:
			s.keeper.Kill()
			<-s.ended
			return
		}
	}
}
