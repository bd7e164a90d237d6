//go:build linux

package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/machine/host"
	"plimsoll/internal/run/launch"
	"plimsoll/internal/state/service"
	"plimsoll/internal/state/service/protocol"
	"plimsoll/internal/state/tier"
)

// serveOptions are the flags of the verb.
type serveOptions struct {
	socket, metrics  string
	folders          []string
	reserve          int
	hostProfile      string
	sums             string
	tier             tierOptions
	badTier          error // what is wrong with the tier of the environment
	untilStdinCloses bool
}

func serveCommand() *cobra.Command {
	var options serveOptions
	command := &cobra.Command{
		Use:   "serve --socket PATH",
		Short: "Hold the optimizer state of a job, and update it for its trainers",
		Long: `Serve is the optimizer service. It holds the optimizer state of all ranks of
this host in shared memory, which the trainers have mapped too, and updates it
for them. The state outlives a trainer that dies. It also outlives the service:
serve starts the service again, which finishes the step that was under way.

With --tier the state is in files on disks, and only a window of it in memory.
It then outlives the host, too: a service that starts with the same --tier goes
on from the last step. The environment says the same with PLIMSOLL_TIER and
PLIMSOLL_TIER_MEMORY, also to the service of plimsoll run.

"plimsoll run" has a service of its own; serve is for trainers that something
else starts. It ends with SIGTERM or Ctrl-C, and finishes checkpoints that are
being written first; a second signal ends it at once. As a systemd unit it
inherits its socket (ListenSequentialPacket=) and keeps its memory
(FileDescriptorStoreMax=).

Where sockets or memory files are forbidden, --folder has the state in files of
a folder, and trainers connect through a named pipe there. The state then
outlives the service and its trainers, but not the host.`,
		Example: `  plimsoll serve --socket ~/.plimsoll/socket
  plimsoll serve --socket ~/.plimsoll/socket --metrics 127.0.0.1:9464
  plimsoll serve --socket ~/.plimsoll/socket --tier /mnt/nvme0,/mnt/nvme1
  plimsoll serve --folder /dev/shm/plimsoll`,
		Args: noArguments,
		RunE: func(c *cobra.Command, _ []string) error { return runServe(c, options) },
	}
	flags := command.Flags()
	flags.SortFlags = false
	flags.StringVar(&options.socket, "socket", "", "`path` of the socket, of at most 100 bytes. Serve makes its "+
		"directory and removes it in the end; an existing directory must be for this user alone (mode 0700)")
	flags.StringSliceVar(&options.folders, "folder", nil, "`folders` for the state, in place of --socket. A session "+
		"is in the first one with room, and trainers connect to the pipe \""+protocol.RequestsName+"\" in the first. "+
		"Each must be for this user alone (mode 0700)")
	flags.StringVar(&options.metrics, "metrics", "", "`address` at which to answer Prometheus "+
		"(http://ADDRESS/metrics), such as :9464 (for this host alone) or 10.0.0.5:9464")
	reserveFlag(command, &options.reserve)
	hostProfileFlag(command, &options.hostProfile)
	sums := cmp.Or(os.Getenv(sumsVariable), service.SumsNames[0])
	choiceFlag(command, &options.sums, "sums", sums, "sums of the state, by which each step finds bits that have "+
		"flipped in memory: VALUES. auto has them where they take no time. "+sumsVariable+" says the same, also to "+
		"the service of plimsoll run", service.SumsNames)
	var otherwise tierOptions
	otherwise, options.badTier = tierOfService()
	tierFlags(command, &options.tier, otherwise)
	flags.BoolVar(&options.untilStdinCloses, "until-stdin-closes", false,
		"end when stdin closes, as it does when the process at its other end dies. The folders of --folder are "+
			"removed then, unless the last line of stdin is \"keep\"")
	return command
}

// sumsVariable is the variable of the environment that says which sessions have sums.
const sumsVariable = "PLIMSOLL_SUMS"

func runServe(c *cobra.Command, o serveOptions) error {
	if _, err := service.ParseSums(o.sums); err != nil {
		return fault.Inputf("--sums (or %s) is %v", sumsVariable, err)
	}
	if o.badTier != nil && !c.Flags().Changed("memory") {
		return &fault.Input{What: tierMemoryVariable, Err: o.badTier}
	}
	if err := o.tier.check(c); err != nil {
		return err
	}
	ctx := interruptible(c)
	given, err := service.Inherit()
	if err != nil {
		return err
	}
	if given != nil {
		return serve(ctx, c, given, o)
	}
	switch {
	case o.socket == "" && len(o.folders) == 0:
		return fault.Inputf("--socket is missing: expected the path of the socket to listen at").
			WithHint("give --socket ~/.plimsoll/socket")
	case o.socket != "" && len(o.folders) > 0:
		return fault.Inputf("--socket and --folder are given: expected one of them, as trainers of --folder use " +
			"no socket")
	}
	keep := make(chan bool, 1)
	if o.untilStdinCloses {
		var cancel context.CancelFunc
		ctx, cancel = context.WithCancel(ctx)
		go func() {
			keep <- service.UntilClosed(os.Stdin)
			cancel()
		}()
	}
	if err := checkMetrics(o.metrics, logTo(c)); err != nil {
		return err
	}
	release, err := lockTier(o.tier.folders)
	if err != nil {
		return err
	}
	release() // the service locks it
	launch.SpareService()
	if _, err := localHost(o.reserve); err != nil {
		return err
	}
	for i, folder := range o.folders {
		if o.folders[i], err = filepath.Abs(folder); err != nil {
			return err
		}
	}
	keeper, err := keeperWith(o.socket, o.metrics, logTo(c), "--reserve", strconv.Itoa(o.reserve),
		"--"+hostProfileFlagName, o.hostProfile, "--sums", o.sums,
		"--tier", strings.Join(o.tier.folders, ","), "--memory", strconv.FormatInt(int64(o.tier.memory), 10)+"B",
		"--folder", strings.Join(o.folders, ","))
	if err != nil {
		return err
	}
	flag := "--socket"
	if keeper.Folders = o.folders; len(o.folders) > 0 {
		flag = "--folder"
	}
	if err := keeper.Listen(); err != nil {
		return &fault.Input{What: flag, Err: err}
	}
	go killWhenAskedAgain(ctx, keeper)
	err = keeper.Run(ctx)
	select {
	case stays := <-keep:
		if !stays {
			err = errors.Join(err, keeper.Discard())
		}
	default: // a signal has ended it, or the service
	}
	return err
}

// killWhenAskedAgain kills the service on a second signal, for users who do not want to wait for checkpoints.
func killWhenAskedAgain(ctx context.Context, keeper *service.Keeper) {
	<-ctx.Done()
	again := make(chan os.Signal, 1)
	signal.Notify(again, os.Interrupt, syscall.SIGTERM)
	<-again
	keeper.Kill()
}

// checkMetrics refuses an address at which the service could not answer Prometheus.
func checkMetrics(address string, logf func(string, ...any)) error {
	if address == "" {
		return nil
	}
	listener, err := service.ListenForMetrics(address)
	if err != nil {
		return &fault.Input{What: "--metrics", Err: err,
			Hint: "give the address of this host and a port that is free, such as 127.0.0.1:9464"}
	}
	if strings.HasPrefix(address, ":") {
		logf("--metrics %s: this host alone can read them, at http://%v/metrics; for all networks give 0.0.0.0%s",
			address, listener.Addr(), address)
	}
	return listener.Close()
}

// keeperOf returns a keeper whose service is this same program. It uses all cores that it may use: the keeper of a job
// has those that the ranks leave.
func keeperOf(socket, metrics string, logf func(string, ...any)) (*service.Keeper, error) {
	return keeperWith(socket, metrics, logf, "--"+hostProfileFlagName, noProfile)
}

// keeperWith is keeperOf with more arguments for the service.
func keeperWith(socket, metrics string, logf func(string, ...any), arguments ...string) (*service.Keeper, error) {
	self, err := os.Executable()
	if err != nil {
		return nil, err
	}
	return &service.Keeper{Socket: socket, Logf: logf, Command: func() *exec.Cmd {
		command := exec.Command(running(self), append([]string{"serve"}, arguments...)...)
		command.Args[0] = "plimsoll"
		if metrics != "" {
			command.Args = append(command.Args, "--metrics", metrics)
		}
		command.Stdout, command.Stderr = os.Stderr, os.Stderr
		return command
	}}, nil
}

// running returns where to find this process's program: its path, or /proc/self/exe where an upgrade has replaced or
// removed the file. Only a service of the same release can take over the state.
func running(path string) string {
	const held = "/proc/self/exe"
	found, missing := os.Stat(path)
	own, err := os.Stat(held)
	if err == nil && (missing != nil || !os.SameFile(found, own)) {
		return held
	}
	return path
}

// localHost returns this host without the cores that are left to the system.
func localHost(reserve int) (*host.Host, error) {
	h, err := host.Local()
	if err != nil {
		return nil, err
	}
	return binding.Reserve(h, reserve)
}

// serve is the service itself.
func serve(ctx context.Context, c *cobra.Command, given *service.Inherited, o serveOptions) error {
	if err := given.UseFolders(o.folders); err != nil {
		return fmt.Errorf("the folders of the state: %w", err)
	}
	hasState := len(given.Files) > 0
	release, err := lockTier(o.tier.folders)
	if err != nil {
		return err
	}
	defer release()
	server, err := service.NewServer(c.Root().Version, given,
		func() (*host.Host, error) { return localHost(o.reserve) },
		onceForRanks(hostProfile{o.hostProfile, 0, logTo(c)}), o.tier.tier(), logTo(c))
	if err != nil {
		return err
	}
	sums, _ := service.ParseSums(o.sums) // was checked
	server.SetSums(sums)
	if o.metrics != "" {
		stop, err := server.ServeMetrics(o.metrics)
		switch {
		case err == nil:
			defer stop()
		// the address was taken since the check; the state matters more than metrics
		case hasState || errors.Is(err, syscall.EADDRINUSE):
			logTo(c)("--metrics: %v: the optimizer service goes on without", err)
		default:
			return &fault.Input{What: "--metrics", Err: err}
		}
	}
	err = server.Serve(ctx)
	if errors.Is(err, context.Canceled) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("the optimizer service: %w", err)
	}
	return nil
}

// lockTier locks the folders of a tier until the function that it returns is called.
func lockTier(folders []string) (release func(), err error) {
	if release, err = tier.Lock(folders); err != nil {
		return nil, &fault.Input{What: "--tier", Err: err}
	}
	return release, nil
}

func socketFlag(c *cobra.Command, socket *string) {
	c.Flags().StringVar(socket, "socket", "", "`path` of the service's socket (default: $"+service.SocketVariable+")")
}
