package main

import (
	"fmt"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/jedib0t/go-pretty/v6/text"
	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/input/gpu"
	"plimsoll/internal/machine/binding"
	"plimsoll/internal/plan/job"
)

// formerNames maps former names of flags to their present names. The former names still work, and no help shows them.
var formerNames = map[string]string{
	"engine-version": "deepspeed-version",
	"modules":        "model-library",
}

// presentName returns the name under which a flag is looked up.
func presentName(_ *pflag.FlagSet, name string) pflag.NormalizedName {
	name = strings.ReplaceAll(name, "_", "-") // as argparse's users write them
	if present := formerNames[name]; present != "" {
		name = present
	}
	return pflag.NormalizedName(name)
}

// choiceFlag adds a flag with a list of values. The command checks the value against the list, the shell completes
// it, and the usage shows it in place of VALUES.
func choiceFlag(c *cobra.Command, to *string, name, standard, usage string, values []string) {
	listFlag(c, to, name, standard, usage, values, cobra.ShellCompDirectiveNoFileComp)
}

// choiceOrFileFlag is choiceFlag for flags that also take the name of a file.
func choiceOrFileFlag(c *cobra.Command, to *string, name, standard, usage string, values []string) {
	listFlag(c, to, name, standard, usage, values, cobra.ShellCompDirectiveDefault)
}

func listFlag(c *cobra.Command, to *string, name, standard, usage string, values []string,
	beside cobra.ShellCompDirective) {
	c.Flags().StringVar(to, name, standard, strings.Replace(usage, "VALUES", fault.OneOf(values...), 1))
	complete(c, name, cobra.FixedCompletions(values, beside))
}

// complete panics only when the flag does not exist.
func complete(c *cobra.Command, flag string, with cobra.CompletionFunc) {
	if err := c.RegisterFlagCompletionFunc(flag, with); err != nil {
		panic(err)
	}
}

// given returns the value of a flag, or nil if the flag was not given.
func given[T any](c *cobra.Command, flag string, value *T) *T {
	if !c.Flags().Changed(flag) {
		return nil
	}
	return value
}

// wrapped lists names in lines of up to 78 characters.
func wrapped(names []string) string {
	return "  " + strings.Join(fold(strings.Join(names, " "), 76), "\n  ")
}

// fold breaks a text into lines of up to width characters.
func fold(s string, width int) []string {
	broken := strings.Split(text.WrapSoft(s, width), "\n")
	for i, line := range broken {
		broken[i] = strings.TrimRight(line, " ")
	}
	return broken
}

// flagUsage is a line of pflag's usage: names and type of a flag, and what it is for.
var flagUsage = regexp.MustCompile(`(?m)^( +\S.*?) {3,}(\S.*)$`)

// groupAnnotation is the annotation of a flag with the title of its group in the help.
const groupAnnotation = "plimsoll.group"

// Titles of groups that several commands have.
const (
	statesOnHost = "States on the host (plimsoll.torch)"
	machineSpeed = "Speed of the machine"
)

// group puts the flags that a function adds below a title in the help.
func group(c *cobra.Command, title string, add func()) {
	known := map[string]bool{}
	c.Flags().VisitAll(func(f *pflag.Flag) { known[f.Name] = true })
	add()
	c.Flags().VisitAll(func(f *pflag.Flag) {
		if !known[f.Name] {
			if err := c.Flags().SetAnnotation(f.Name, groupAnnotation, []string{title}); err != nil {
				panic(err) // the flag exists
			}
		}
	})
}

// usages returns the usages of flags for a terminal of 80 columns, group by group. Flags without a group come last.
func usages(flags *pflag.FlagSet) string {
	var titles []string
	groups := map[string]*pflag.FlagSet{}
	flags.VisitAll(func(f *pflag.Flag) {
		title := ""
		if of := f.Annotations[groupAnnotation]; len(of) > 0 {
			title = of[0]
		}
		if groups[title] == nil {
			groups[title] = pflag.NewFlagSet("", pflag.ContinueOnError)
			groups[title].SortFlags = flags.SortFlags
			titles = append(titles, title)
		}
		groups[title].AddFlag(f)
	})
	if len(titles) == 1 {
		return usagesOf(flags)
	}
	var b strings.Builder
	for _, title := range titles {
		if title != "" {
			fmt.Fprintf(&b, " %s:\n%s\n", title, usagesOf(groups[title]))
		}
	}
	if rest := groups[""]; rest != nil {
		fmt.Fprintf(&b, " Other:\n%s", usagesOf(rest))
	}
	return b.String()
}

// usagesOf returns the usages of one group. The usage of a flag with a long name is below it.
func usagesOf(flags *pflag.FlagSet) string {
	const terminal, longestName = 80, 30
	all := flagUsage.FindAllStringSubmatch(flags.FlagUsages(), -1)
	for _, usage := range all {
		if !strings.HasSuffix(usage[2], "(default true)") { // the name of a switch turns it on
			usage[1] = strings.TrimSuffix(usage[1], "[=true|false]")
		}
	}
	column := 0
	for _, usage := range all {
		if n := len(usage[1]); n <= longestName {
			column = max(column, n+2)
		}
	}
	column = max(column, 20)
	var b strings.Builder
	for _, usage := range all {
		name := usage[1]
		if len(name) > longestName {
			fmt.Fprintln(&b, name)
			name = ""
		}
		for _, line := range fold(usage[2], terminal-column) {
			fmt.Fprintf(&b, "%-*s%s\n", column, name, line)
			name = ""
		}
	}
	return b.String()
}

func fsrootFlag(c *cobra.Command, fsroot *string) {
	c.Flags().StringVar(fsroot, "fsroot", "",
		"read another machine: a `directory` with its proc and sys, or a file of topology --record")
}

func memoryPolicyFlag(c *cobra.Command, policy *string) {
	choiceFlag(c, policy, "memory-policy", "", "memory `policy` of a rank: VALUES (default: preferred for one NUMA "+
		"node, interleave for several)", binding.MemoryPolicies)
}

// leastInterval is the least time between two samples: sampling should not take a noticeable part of a core.
const leastInterval = 100 * time.Millisecond

func intervalFlag(c *cobra.Command, interval *time.Duration) {
	c.Flags().DurationVar(interval, "interval", time.Second, "`time` between two samples of a recording")
}

func reserveFlag(c *cobra.Command, cores *int) {
	c.Flags().IntVar(cores, "reserve", 0, "`cores` to leave to the system and to other programs: the slowest ones, "+
		"and the first of each NUMA node")
}

// smtFlag adds a flag that is "on" or "off", as in /sys/devices/system/cpu/smt/control.
func smtFlag(c *cobra.Command, off *bool) {
	c.Flags().Var((*smt)(off), "smt", "all hardware threads of a core (on), or one (off)")
	complete(c, "smt", cobra.FixedCompletions(smtValues, cobra.ShellCompDirectiveNoFileComp))
}

var smtValues = []string{"on", "off"}

// smt is the value of the flag: true for off.
type smt bool

func (s *smt) Set(text string) error {
	if !slices.Contains(smtValues, text) {
		return fault.Inputf("%q is neither on nor off", text).
			WithHint("give on, or off for one hardware thread of each core")
	}
	*s = text == "off"
	return nil
}

func (s *smt) String() string {
	if *s {
		return "off"
	}
	return "on"
}

// Type returns the name of the type for help texts.
func (*smt) Type() string { return strings.Join(smtValues, "|") }

// bytesFlag is a size in bytes on the command line.
type bytesFlag ledger.Bytes

func (b *bytesFlag) String() string {
	if *b == 0 {
		return ""
	}
	return ledger.Bytes(*b).String()
}
func (b *bytesFlag) Type() string { return "size" }
func (b *bytesFlag) Set(text string) error {
	bytes, err := ledger.ParseBytes(text)
	if err == nil && (bytes == 0 || text[len(text)-1] <= '9') { // a number without a unit is most likely a mistake
		return fault.Inputf("expected a number above 0 with a unit, such as 80GiB").WithHint(inUnits(bytes))
	}
	*b = bytesFlag(bytes)
	return err
}

// inUnits returns the hint at a size without a unit: few are GiB, more are MiB, as nvidia-smi has them, and many bytes.
func inUnits(n ledger.Bytes) string {
	switch {
	case n == 0:
		return ""
	case n < 2000:
		return fmt.Sprintf("did you mean %dGiB?", n)
	case n < ledger.MiB:
		return fmt.Sprintf("did you mean %dMiB?", n)
	}
	return fmt.Sprintf("did you mean %dB, which is %v?", n, n)
}

// wholeNumber returns the error for a text that is no whole number from some number on, with what it may mean.
func wholeNumber(text string, least int) error {
	e := fault.Inputf("expected a whole number from %d on, in digits alone", least)
	lower := strings.ToLower(text)
	if thousands := inThousands.FindStringSubmatch(lower); thousands != nil {
		n, _ := strconv.Atoi(thousands[1])
		return e.WithHint(fmt.Sprintf("write %d, or %d", n*1024, n*1000))
	}
	if grouped.MatchString(text) {
		return e.WithHint("write " + strings.NewReplacer(",", "", "_", "", "'", "").Replace(text))
	}
	if ofGPU := counted.FindStringSubmatch(lower); ofGPU != nil {
		return e.WithHint("write " + ofGPU[1] + "; the name of a GPU goes to --gpu")
	}
	if devices := strings.Split(text, ","); len(devices) > 1 && isRange(devices) {
		return e.WithHint(fmt.Sprintf("write %d, how many they are", len(devices)))
	}
	if nodes := ofNodes.FindStringSubmatch(lower); nodes != nil {
		return e.WithHint(fmt.Sprintf("nodes and the GPUs of each are two flags: --nodes %s --gpus %s", nodes[1],
			nodes[2]))
	}
	if lower == "all" || lower == "gpu" {
		return e.WithHint("give their number: plans are made where the GPUs need not be")
	}
	if lower == "auto" {
		return e.WithHint("give a number, or leave it out; plimsoll fit searches for what is best")
	}
	return e
}

// isRange reports whether texts are the numbers from 0 on, as CUDA_VISIBLE_DEVICES lists GPUs.
func isRange(texts []string) bool {
	for i, text := range texts {
		if text != strconv.Itoa(i) {
			return false
		}
	}
	return true
}

var (
	inThousands = regexp.MustCompile(`^([0-9]{1,6})k$`)
	counted     = regexp.MustCompile(`^([0-9]+) ?x ?[a-z]`)
	ofNodes     = regexp.MustCompile(`^([0-9]{1,4})x([0-9]{1,4})$`)
	grouped     = regexp.MustCompile(`^[0-9]{1,3}([,_'][0-9]{3})+$`)
)

// rateFlag is a rate on the command line, with or without a unit.
type rateFlag struct {
	to    *float64
	units units
}

// units are multiples of the first.
type units []unit

type unit struct {
	name string
	is   float64
}

var (
	bandwidths = units{{"GB/s", 1}, {"TB/s", 1000}, {"MB/s", 1e-3}, {"GiB/s", 1 << 30 / 1e9}, {"Gbit/s", 1.0 / 8},
		{"Gb/s", 1.0 / 8}, {"Gbps", 1.0 / 8}}
	operations = units{{"TFLOP/s", 1}, {"TFLOPS", 1}, {"PFLOP/s", 1000}}
)

func (r *rateFlag) String() string {
	if r.to == nil || *r.to == 0 {
		return ""
	}
	return strconv.FormatFloat(*r.to, 'g', -1, 64)
}
func (r *rateFlag) Type() string { return "float" }
func (r *rateFlag) Set(text string) error {
	digits := strings.TrimRightFunc(text, func(c rune) bool { return c != '.' && (c < '0' || c > '9') })
	name := strings.TrimSpace(text[len(digits):])
	rate, err := strconv.ParseFloat(digits, 64)
	i := 0
	if name != "" {
		i = slices.IndexFunc(r.units, func(u unit) bool { return u.name == name })
	}
	if err != nil || i < 0 {
		var names []string
		for _, u := range r.units {
			names = append(names, u.name)
		}
		return fault.Inputf("expected a number, in %s without a unit", names[0]).
			WithHint("units are " + strings.Join(names, ", "))
	}
	*r.to = rate * r.units[i].is
	return nil
}

// countFlag is a count on the command line. A missing flag differs from zero.
type countFlag int

func (n *countFlag) String() string {
	if *n == 0 {
		return ""
	}
	return strconv.Itoa(int(*n))
}
func (n *countFlag) Type() string { return "int" }
func (n *countFlag) Set(text string) error {
	count, err := strconv.Atoi(text)
	if err != nil || count < 1 {
		return wholeNumber(text, 1)
	}
	*n = countFlag(count)
	return nil
}

// rankFlag is the rank of an adapter on the command line.
type rankFlag struct {
	rank *int
	of   *job.Shorthand
}

// usualRank is what withRanks gives to a flag that has no rank.
const usualRank = "usual"

func (r rankFlag) String() string {
	if r.rank == nil {
		return ""
	}
	return (*countFlag)(r.rank).String()
}

func (r rankFlag) Type() string { return "int" }

func (r rankFlag) Set(text string) error {
	if r.of.AnyRank = text == usualRank; r.of.AnyRank {
		*r.rank = job.UsualRank
		return nil
	}
	return (*countFlag)(r.rank).Set(text)
}

// withRanks gives the usual rank to the flags of adapters that have none: they are last, or another flag follows. It
// leaves the arguments of programs alone.
func withRanks(root *cobra.Command, arguments []string) []string {
	if c, _, err := root.Find(arguments); err != nil || c.Flags().Lookup("lora") == nil {
		return arguments
	}
	list := slices.Clone(arguments)
	for i, a := range list {
		isLast := i+1 == len(list) || strings.HasPrefix(list[i+1], "--")
		switch {
		case a == "--", slices.Contains(launchers, filepath.Base(a)):
			return list
		case isLast && (a == "--lora" || a == "--qlora"):
			list[i] = a + "=" + usualRank
		}
	}
	return list
}

// joinedFlag joins the texts of a flag that is given again with commas.
type joinedFlag string

func (j *joinedFlag) String() string { return string(*j) }
func (j *joinedFlag) Type() string   { return "engine" }
func (j *joinedFlag) Set(text string) error {
	if *j != "" && text != "" {
		text = string(*j) + "," + text
	}
	*j = joinedFlag(text)
	return nil
}

// gpusFlag is a number of GPUs on the command line. It refuses their name, which may be a number, too: 4090.
type gpusFlag int

func (n *gpusFlag) String() string { return (*countFlag)(n).String() }
func (n *gpusFlag) Type() string   { return "int" }
func (n *gpusFlag) Set(text string) error {
	named := gpu.Named(text)
	switch {
	case len(named) > 0:
	case gpu.LooksNamed(text):
		return fault.Inputf("this is how GeForce cards are called, expected a number of GPUs").
			WithHint("give the number of GPUs to --gpus, and the card's name or memory to --gpu or --gpu-memory")
	default:
		return (*countFlag)(n).Set(text)
	}
	hint := "give the number of GPUs to --gpus, and " + named[0] + " to --gpu"
	if len(named) > 1 {
		hint = "give the number of GPUs to --gpus, and to --gpu one of " + strings.Join(named, ", ")
	}
	return fault.Inputf("this is the name of a GPU, expected a number of them").WithHint(hint)
}

// optionalCount is a count on the command line that may be zero. It is nil if the flag is missing.
type optionalCount struct{ to **int }

func (n optionalCount) String() string {
	if n.to == nil || *n.to == nil {
		return ""
	}
	return strconv.Itoa(**n.to)
}
func (n optionalCount) Type() string { return "int" }
func (n optionalCount) Set(text string) error {
	count, err := strconv.Atoi(text)
	if err != nil || count < 0 {
		return wholeNumber(text, 0)
	}
	*n.to = &count
	return nil
}

// onlineFlag adds the flag that lets --model ask the hub.
func onlineFlag(c *cobra.Command, online *bool) {
	c.Flags().BoolVar(online, "online", false,
		"ask the Hugging Face hub for a --model that this host does not have")
}
