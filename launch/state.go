package launch

import (
	"context"
	"errors"
	"fmt"
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

	"plimsoll/binding"
	"plimsoll/service"
)

// NewService returns the keeper of an optimizer service that listens at a socket. The
// service answers Prometheus at an address, unless that is empty.
type NewService func(socket, metrics string, logf func(format string, values ...any)) (*service.Keeper, error)

// jobVariable tells the optimizer service the name of the job.
const jobVariable = "PLIMSOLL_JOB"

// stateService is the optimizer service of a job. It starts when a rank first connects
// to it. Nil means none.
type stateService struct {
	keeper *service.Keeper
	end    context.CancelFunc
	ended  chan struct{}
}

// socketDirectory chooses a directory for the socket of the job's optimizer service. It
// returns "" if the ranks are told of another service. The keeper creates the
// directory, and both keeper and guard remove it.
func socketDirectory(ranks []Rank) string {
	told := func(variable string) bool { return strings.HasPrefix(variable, service.SocketVariable+"=") }
	if slices.ContainsFunc(ranks, func(r Rank) bool { return slices.ContainsFunc(r.Environment, told) }) {
		return ""
	}
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
		socket := filepath.Join(directory, "socket")
		info, err := os.Lstat(socket)
		if err != nil || info.Mode().Type() != os.ModeSocket ||
			time.Since(info.ModTime()) < time.Minute { // it may not listen yet
			continue
		}
		c, err := net.Dial("unixpacket", socket)
		if err == nil {
			_ = c.Close()
		} else if errors.Is(err, syscall.ECONNREFUSED) {
			removeSocketDirectory(directory) // fails for another user's directory
		}
	}
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
	named := func(variable string) bool { return strings.HasPrefix(variable, jobVariable+"=") }
	if !slices.ContainsFunc(environment, named) {
		variables = append(variables, jobVariable+"="+filepath.Base(filepath.Dir(s.keeper.Socket)))
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
