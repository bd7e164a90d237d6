package main

import (
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/signal"
	"regexp"
	"runtime"
	"slices"
	"strings"
	"sync"
	"syscall"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/safe"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/input/model"
)

// Exit codes.
const (
	exitDone       = 0
	exitInternal   = 1
	exitInput      = 2 // bad usage or input
	exitDoesNotFit = 3
	exitDiffers    = 4 // measured and planned bytes differ beyond the tolerance
	exitFailed     = 5 // a failure was found
	exitInterrupt  = 130
	exitSignal     = 128 // and the number of the signal that ended the program
)

// outcome is an exit code for a command that has already printed its result.
type outcome int

func (o outcome) Error() string { return fmt.Sprintf("exit code %d", int(o)) }

// unlessTooLarge says an error of a type that means too little room, and returns its exit code. It returns others.
func unlessTooLarge[E error](c *cobra.Command, err error) error {
	var tooLarge E
	if !errors.As(err, &tooLarge) {
		return err
	}
	logTo(c)("%v", err)
	return outcome(exitDoesNotFit)
}

// run is the whole program; it returns the exit code.
func run(arguments []string, stdout, stderr io.Writer) int {
	letQuit = endAtQuit()
	defer letQuit()
	root := rootCommand()
	root.SetArgs(withRanks(root, arguments))
	root.SetOut(stdout)
	root.SetErr(stderr)
	root.SetContext(context.Background())
	c, err := root, typographic(arguments)
	if err == nil {
		c, err = root.ExecuteC()
	}
	return ended(c, err)
}

// ended says why a command has failed, unless it has said so itself, and returns the exit code.
func ended(c *cobra.Command, err error) int {
	code := exitCode(c.Context(), err)
	hintFor(c, err)
	var said outcome
	if err != nil && !errors.As(err, &said) {
		fmt.Fprintf(c.ErrOrStderr(), "plimsoll: %s\n", fault.Printable(err.Error()))
	}
	return code
}

// inBrowser is whether this is the program of a page. It gets no signals, and its files are in memory.
const inBrowser = runtime.GOOS == "js"

// letQuit leaves SIGQUIT to whoever handles it from then on.
var letQuit = func() {}

// endAtQuit ends the program at SIGQUIT, as it ends other programs, until the returned function is called. Go's runtime
// would print the stacks of all goroutines, and the user has only pressed Ctrl-\.
func endAtQuit() (stop func()) {
	if inBrowser || signal.Ignored(syscall.SIGQUIT) { // in a browser signal.Ignored panics
		return func() {}
	}
	quit := make(chan os.Signal, 1)
	signal.Notify(quit, syscall.SIGQUIT)
	go func() {
		if _, came := <-quit; came {
			os.Exit(exitSignal + int(syscall.SIGQUIT))
		}
	}()
	return sync.OnceFunc(func() {
		signal.Stop(quit)
		close(quit)
	})
}

// typographic refuses a dash that a word processor has put in place of two hyphens.
func typographic(arguments []string) error {
	for _, a := range arguments {
		if a == "--" {
			break
		}
		if plain := strings.TrimLeft(a, "\u2013\u2014-"); strings.HasPrefix(strings.TrimLeft(a, "-"), "\u2013") ||
			strings.HasPrefix(strings.TrimLeft(a, "-"), "\u2014") {
			return fault.Inputf("%q begins with a typographic dash", a).WithHint("type two hyphens: --" + plain)
		}
	}
	return nil
}

// anotherFlag is a hint at the flag that takes a file.
var anotherFlag = regexp.MustCompile(`^give it as --(\S+)$`)

// hintFor changes the hint at a flag that the command does not have: plan has it.
func hintFor(c *cobra.Command, err error) {
	var input *fault.Input
	if !errors.As(err, &input) {
		return
	}
	if flag := anotherFlag.FindStringSubmatch(input.Hint); flag != nil && c.Flags().Lookup(flag[1]) == nil {
		input.Hint = fmt.Sprintf("%s does not read such files; plimsoll plan takes it as --%s", c.CommandPath(),
			flag[1])
	}
}

// interruptible returns a context that SIGINT and SIGTERM cancel, for commands that must clean up. The signals end
// all other commands at once, whatever these are waiting for.
func interruptible(c *cobra.Command) context.Context {
	ctx, _ := signal.NotifyContext(c.Context(), os.Interrupt, syscall.SIGTERM) // until the program ends
	c.SetContext(ctx)
	return ctx
}

func exitCode(ctx context.Context, err error) int {
	var input *fault.Input
	var said outcome
	switch {
	case err == nil:
		return exitDone
	case errors.As(err, &said):
		return int(said)
	case ctx.Err() != nil:
		return exitInterrupt
	case errors.As(err, &input):
		return exitInput
	}
	return exitInternal
}

func init() { cobra.AddTemplateFunc("usages", usages) }

func rootCommand() *cobra.Command {
	root := &cobra.Command{
		Use:   "plimsoll",
		Short: "What offloaded optimizer state takes, byte by byte",
		Long: `Plimsoll plans the memory of a training job before it starts, holds its
optimizer state on the host in the fewest bytes, and shows afterwards where
every byte went.`,
		Example: `  plimsoll plan --model qwen2.5-7b --gpu RTX-4090 --lora 16
  plimsoll plan --model llama-3-8b --gpus 8 --gpu H100-80GB ds_config.json
  plimsoll explain train.log`,
		Version:       version(),
		SilenceUsage:  true,
		SilenceErrors: true,
		Args:          noArguments,
		RunE:          func(c *cobra.Command, _ []string) error { return c.Help() },
	}
	root.PersistentFlags().BoolFunc("show-secrets", "leave tokens, keys and passwords in what is shown and written",
		func(string) error {
			safe.ShowSecrets()
			return nil
		})
	root.SetFlagErrorFunc(badFlag)
	root.AddCommand(commands()...)
	root.SetHelpCommand(helpCommand(root))
	groupCommands(root)
	root.SetGlobalNormalizationFunc(presentName)
	root.SetUsageTemplate(strings.ReplaceAll(root.UsageTemplate(), "Flags.FlagUsages |", "Flags | usages |"))
	return root
}

// helpCommand is like cobra's, and refuses commands that there are not.
func helpCommand(root *cobra.Command) *cobra.Command {
	return &cobra.Command{
		Use:   "help [COMMAND]",
		Short: "Show the help of a command",
		Long:  `Help shows what a command is for, with its flags. It is the same as --help.`,
		RunE:  func(_ *cobra.Command, arguments []string) error { return runHelp(root, arguments) },
	}
}

func runHelp(root *cobra.Command, arguments []string) error {
	c, rest, err := root.Find(arguments)
	if err == nil && len(rest) == 0 {
		c.InitDefaultHelpFlag()
		return c.Help()
	}
	if len(rest) == 0 {
		c, rest = root, arguments
	}
	return noArguments(c, rest)
}

// commandGroups are the titles of the help, each with its commands.
var commandGroups = []struct {
	title    string
	commands []string
}{
	{"Before a run:", []string{"plan", "fit", "roads", "rehearse", "models"}},
	{"This host:", []string{"topology", "binding", "tune", "bench"}},
	{"Run:", []string{"run", "watch", "serve", "stat", "restore", "checkpoint"}},
	{"After a run:", []string{"explain", "compare", "export"}},
}

// groupCommands puts commands below the titles of the help.
func groupCommands(root *cobra.Command) {
	for _, g := range commandGroups {
		for _, c := range root.Commands() {
			if !slices.Contains(g.commands, c.Name()) {
				continue
			}
			if !root.ContainsGroup(g.title) {
				root.AddGroup(&cobra.Group{ID: g.title, Title: g.title})
			}
			c.GroupID = g.title
		}
	}
}

// noArguments refuses arguments, and names the nearest command.
func noArguments(c *cobra.Command, arguments []string) error {
	if len(arguments) == 0 {
		return nil
	}
	e := fault.Inputf("%s takes no argument %q", c.CommandPath(), arguments[0]).
		WithHint("see " + c.CommandPath() + " --help")
	var names []string
	for _, sub := range c.Commands() {
		names = append(names, sub.Name())
	}
	if len(names) == 0 {
		return e
	}
	e.What = fmt.Sprintf("%s has no command %q", c.CommandPath(), arguments[0])
	nearest := fault.Nearest(arguments[0], names)
	if meant := otherCommands[strings.ToLower(arguments[0])]; slices.Contains(names, meant) {
		nearest = meant
	}
	if nearest == "" && slices.Contains(names, "plan") && isPlanned(arguments[0]) {
		nearest = strings.Join(append([]string{"plan"}, arguments...), " ")
	}
	if nearest != "" {
		e.Hint = "did you mean " + c.CommandPath() + " " + nearest + "? " + e.Hint
	}
	return e
}

// isPlanned reports whether a word is what plan takes: a GPU, a model or a file that is here.
func isPlanned(word string) bool {
	if _, err := gpu.Find(word); err == nil {
		return true
	}
	if _, err := os.Stat(word); err == nil {
		return true
	}
	_, err := model.Described(word)
	return err == nil
}

// otherCommands maps what people may call a command to its name.
var otherCommands = map[string]string{
	"estimate": "plan", "estimate-memory": "plan", "memory": "plan", "size": "plan", "check": "plan", "launch": "run",
	"train": "run", "search": "fit", "advise": "plan", "status": "stat", "top": "watch", "monitor": "watch",
	"benchmark": "bench", "info": "topology", "why": "explain", "diagnose": "explain", "list": "models",
	"gpus": "models", "predict": "plan", "calculate": "plan", "calc": "plan", "fits": "fit", "show": "inspect",
	"will": "plan", "can": "plan", "does": "plan", "how": "plan",
}
