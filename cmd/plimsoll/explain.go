//go:build !page

package main

import (
	"bufio"
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"plimsoll/internal/after/evidence"
	"plimsoll/internal/after/explain"
	"plimsoll/internal/after/snapshot"
	"plimsoll/internal/base/activity"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/files"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/base/samples"
	"plimsoll/internal/input/megatron"
	"plimsoll/internal/input/recipe"
	"plimsoll/internal/plan/job"
	"plimsoll/internal/plan/steptime"
	"plimsoll/internal/show/report"
)

// explainOptions are the flags of the verb.
type explainOptions struct {
	files      []string
	request    job.Request
	clip       float64
	machine    machineOptions
	parameters parametersFlag
	peak, end  bytesFlag
	snapshot   snapshotOptions
	format     report.Format
	long       bool
}

func explainCommand() *cobra.Command {
	var options explainOptions
	command := &cobra.Command{
		Use:   "explain FILE...",
		Short: "Say why a job failed: what ran out, where, and what to change",
		Long: `Explain reads what is left after a failure, and says which resource ran out,
on which rank first and in which phase, which line proves it, who held the
bytes, what it was not, and which changes free how much. It says how sure it is.
Where the files do not tell, it says which command finds the missing evidence.

Explain tells files apart by their content. It reads logs of trainers, launchers
and kernels, counters of cgroups and hosts, messages and JSON of Slurm and
Kubernetes, recordings of plimsoll run --record, documents of plimsoll plan
--out, and the configuration files of the job. Files may be compressed, cut,
coloured or interleaved. A directory stands for its files, a tar or zip
archive for those inside, and - for stdin.

With the configuration of the job, explain offers the changes of plimsoll plan:
each with the line of the file, the bytes that it frees, its time, and whether
the job then fits. It reads all configurations that plan reads, and takes the
same flags of the job and of the machine. They go before files.

Of a memory snapshot of PyTorch alone, explain says who held how many bytes by
component and by line of the source, how much of the reserved memory was free,
and why an allocation failed. It runs nothing of the file.

The exit code is 5 if a failure was found, its cause known or not, and 0 if
nothing is wrong.`,
		Example: `  plimsoll explain train.log dmesg.txt
  plimsoll explain logs/ ds_config.json --model llama-3.1-8b --gpus 8
  plimsoll explain train.log axolotl.yml --gpus 8 --gpu H100-80GB
  journalctl -k --since "1 hour ago" | plimsoll explain train.log -
  plimsoll explain --peak 66GiB --end 53GiB --model falcon-7b --precision fp16
  plimsoll explain oom.pickle --what-if expandable_segments:True
  plimsoll explain --diff before.pickle after.pickle`,
		RunE: func(c *cobra.Command, _ []string) error {
			return reported(func() error { return runExplain(c, options) })
		},
	}
	explainFlags(command, &options)
	return command
}

func explainFlags(c *cobra.Command, o *explainOptions) {
	c.Flags().SortFlags = false
	group(c, "What was read off", func() { readOffFlags(c, o) })
	jobFlags(c, &o.request, &o.clip)
	c.Flags().Lookup("gpus").Usage += " (default: the ranks that the files name)"
	jobArguments(c, &o.request, &o.files)
	group(c, statesOnHost, func() { offloadFlags(c, &o.request.Offload) })
	group(c, megatron.Program, func() { megatronFlags(c, &o.request.MegatronArguments) })
	group(c, machineSpeed, func() {
		machineFlags(c, &o.machine)
		networkFlag(c, &o.machine)
	})
	group(c, "Memory snapshots of PyTorch", func() { snapshotFlags(c, &o.snapshot) })
	group(c, "Result", func() {
		c.Flags().BoolVar(&o.long, "long", false, "print all, and not only what fits on a terminal of 24 lines")
		htmlFlag(c)
		outputFlags(c, &o.format, "print one JSON document ("+explain.Schema+", or "+report.SnapshotSchema+")")
	})
}

// readOffFlags adds the flags for numbers that no file says.
func readOffFlags(c *cobra.Command, o *explainOptions) {
	flags := c.Flags()
	flags.Var(&o.parameters, "parameters", "`number` of trained parameters, such as 3.2e9, for bytes a parameter")
	flags.Var(&o.peak, "peak", "peak of a GPU's memory that you have read off, such as 66GiB")
	flags.Var(&o.end, "end", "memory of the same GPU at the end of a step; explain names the difference")
}

// parametersFlag is a number of parameters on the command line.
type parametersFlag int64

func (n *parametersFlag) String() string {
	if *n == 0 {
		return ""
	}
	return strconv.FormatInt(int64(*n), 10)
}

// Type returns the name of the type for help texts.
func (*parametersFlag) Type() string { return "number" }

func (n *parametersFlag) Set(text string) error {
	value, err := strconv.ParseFloat(text, 64)
	if err != nil || !(value >= 1) || value > 1e15 {
		return fmt.Errorf("expected a number such as 3.2e9")
	}
	*n = parametersFlag(value)
	return nil
}

func runExplain(c *cobra.Command, o explainOptions) error {
	if err := o.check(); err != nil {
		return err
	}
	o.request.Clip = given(c, "clip", &o.clip)
	of, err := o.machine.read(c, &o.request)
	if err != nil {
		return err
	}
	r := &explainReader{stdin: c.InOrStdin(), progress: terminalProgress(c), request: o.request}
	r.in = explain.Inputs{Version: c.Root().Version, Parameters: int64(o.parameters), Peak: ledger.Bytes(o.peak),
		End: ledger.Bytes(o.end)}
	for _, name := range o.files {
		if err := r.argument(name); err != nil {
			return err
		}
	}
	if len(r.refused) > 0 && !r.readAnything() {
		return r.refused[0]
	}
	if err := checkMegatron(c, &r.request); err != nil {
		return err
	}
	if err := o.checkJob(r.request, of); err != nil {
		return err
	}
	if snapshots := len(r.snapshots); snapshots > 0 && r.onlySnapshots() {
		o.snapshot.format = o.format
		return runSnapshot(c, o.snapshot, r.snapshots)
	}
	for _, flag := range []string{"top", "at", "diff", "what-if", "empty-cache-at"} {
		if c.Flags().Changed(flag) {
			return fault.Inputf("--%s is for memory snapshots of PyTorch alone", flag).
				WithHint("name one snapshot, or two with --diff, and no other file")
		}
	}
	return r.explain(c, &o, of)
}

// explain shows the explanation of what was read.
func (r *explainReader) explain(c *cobra.Command, o *explainOptions, of machineOf) error {
	for _, s := range r.written {
		if err := r.holdersOf(s.Path, s.Rank); err != nil {
			return err
		}
	}
	for _, name := range r.snapshots {
		if err := r.holdersOf(name, evidence.NoRank); err != nil {
			return err
		}
	}
	if r.request.NamesModel() {
		r.in.Request = &r.request
		r.in.Machine = func(j *job.Job) steptime.Machine {
			m, _, _ := of.timed(j) // the flags were checked
			return m
		}
	}
	e := explain.Explain(r.in)
	page := report.ExplanationPage(e)
	if !o.long && cmp.Or(o.format, report.Text) == report.Text && !c.Flags().Changed(htmlFormat) {
		page = report.ShortExplanationPage(e)
	}
	if err := present(c, page, o.format); err != nil {
		return err
	}
	if e.Cause.Resource != explain.None {
		return outcome(exitFailed)
	}
	return nil
}

func (o *explainOptions) check() error {
	switch {
	case len(o.files) == 0 && o.peak == 0:
		hint := "give the files that the failure left, such as plimsoll explain train.log"
		if recorded := lastRecording(); recorded != "" {
			hint += "; the last job that failed under plimsoll run is in " + recorded
		}
		return fault.Inputf("no file was named: expected logs, counters, recordings or plans").WithHint(hint)
	case (o.peak == 0) != (o.end == 0) || o.peak < o.end:
		return fault.Inputf("--peak is %v and --end is %v: expected both, and the peak above the end",
			ledger.Bytes(o.peak), ledger.Bytes(o.end))
	}
	return nil
}

// checkJob refuses flags that no plan takes, or that no plan would read. The request is that of flags and files.
func (o *explainOptions) checkJob(with job.Request, of machineOf) error {
	if _, _, err := of(&job.Job{}); err != nil {
		return err
	}
	if o.request.IsEmpty() {
		return nil
	}
	if !with.NamesModel() {
		return fault.Inputf("a flag of the job is given, but no file and no flag names its model").
			WithHint("give --model NAME, or name the model's config.json")
	}
	if _, err := with.Resolve(); err == nil {
		return nil
	}
	q := o.request
	// A file that cannot be planned is no fault of the flags. This model takes sequences of any length.
	q.Model = cmp.Or(q.Model, "llama-3.2-1b")
	_, err := q.Resolve()
	return err
}

// explainReader reads the files of an explanation, each by its content.
type explainReader struct {
	stdin     io.Reader
	in        explain.Inputs
	request   job.Request
	refused   []error                // files that were named and cannot be read, or are empty
	program   string                 // the file of a program that sets up the training, such as axolotl's
	snapshots []string               // files
	written   []samples.RankSnapshot // by ranks, beside a recording
	members   int                    // of archives, that were read
	progress  activity.Progress      // nil if nobody sees it
}

// onlySnapshots reports whether there is nothing to explain beside snapshots.
func (r *explainReader) onlySnapshots() bool {
	return len(r.in.Sources)+len(r.in.Recordings)+len(r.in.Plans)+len(r.in.Configurations) == 0
}

// holdersOf takes who held a GPU's memory in a snapshot: when an allocation failed, or else at the peak.
func (r *explainReader) holdersOf(name string, rank int) error {
	_, devices, err := openSnapshot(name)
	if err != nil {
		return err
	}
	for _, d := range devices {
		entry, err := d.Entry(new(snapshotOptions).time(d))
		if err != nil {
			return err
		}
		taken := explain.Snapshot{File: name, Rank: rank, Device: d.Number}
		for _, h := range d.Holders(entry) {
			taken.Holdings = append(taken.Holdings, ledger.Holding{Component: h.Component, Bytes: h.Bytes})
			taken.Lines = append(taken.Lines, explain.SnapshotLine{Place: h.Place, Bytes: h.Bytes})
		}
		r.in.Snapshots = append(r.in.Snapshots, taken)
	}
	return nil
}

// argument reads a file, all files of a directory, or stdin.
func (r *explainReader) argument(name string) error {
	if name == "-" {
		return r.named(func() error { return r.read("stdin", r.stdin) })
	}
	info, err := os.Stat(name)
	if err != nil || !info.IsDir() {
		return r.named(func() error { return r.file(name) })
	}
	found := 0
	err = filepath.WalkDir(name, func(path string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.Type().IsRegular() {
			return err
		}
		if info, err := entry.Info(); err == nil && info.Size() == 0 {
			return nil // launchers make a log for every stream
		}
		found++
		return r.file(path)
	})
	var input *fault.Input
	if err != nil && !errors.As(err, &input) {
		return &fault.Input{Err: err}
	}
	if err == nil && found == 0 {
		return fault.File(name).Inputf("the directory has no file with content: expected logs, counters or recordings")
	}
	return err
}

// named reads a file that the user has named. One that explain cannot read, or that is empty, is refused if no other
// tells anything. Of an archive, as of a folder, such files are left out.
func (r *explainReader) named(read func() error) error {
	before, members := len(r.in.Sources), r.members
	if err := read(); err != nil || r.members > members {
		return err
	}
	for _, s := range r.in.Sources[before:] {
		if !s.Kind.IsRead() {
			r.refuse(s.Name, string(s.Kind), fault.File(s.Name).Inputf("this is a %s, which explain does not read",
				s.Kind).WithHint("name logs, counters, recordings, plans or memory snapshots of PyTorch"))
		}
	}
	return nil
}

// refuse leaves a file out that the user has named.
func (r *explainReader) refuse(name, kind string, err error) {
	r.refused = append(r.refused, err)
	r.in.LeftOut = append(r.in.LeftOut, explain.File{Name: name, Kind: kind})
}

// readAnything reports whether a file tells anything.
func (r *explainReader) readAnything() bool {
	return len(r.in.Recordings)+len(r.in.Plans)+len(r.in.Configurations)+len(r.snapshots)+r.members > 0 ||
		slices.ContainsFunc(r.in.Sources, func(s *evidence.Source) bool { return s.Kind.IsRead() })
}

func (r *explainReader) file(name string) error {
	file, err := files.OpenPipe(name)
	if file == nil && err == nil {
		file, _, err = files.Open(name)
	}
	if errors.Is(err, fs.ErrNotExist) {
		hint := "give the files that the failure left: logs, dmesg, counters, snapshots or a folder with them"
		if strings.Contains(name, " ") {
			hint = "explain reads files: for a message at hand give -, and type or pipe the message"
		}
		return fault.File(name).Inputf("there is no such file").WithHint(hint)
	}
	if err != nil {
		return &fault.Input{Err: err}
	}
	defer file.Close()
	before := len(r.in.Recordings)
	if err := r.read(name, file); err != nil || len(r.in.Recordings) == before {
		return err
	}
	r.beside(name, r.in.Recordings[before].Began())
	return nil
}

// beside takes the snapshots that ranks have written beside a recording, and not those of an earlier job that was
// recorded there.
func (r *explainReader) beside(recording string, began time.Time) {
	for _, s := range samples.SnapshotsOf(recording) {
		if !s.Written.Before(began) {
			r.written = append(r.written, s)
		}
	}
}

// isWritten reports whether a snapshot lies beside a recording that was read: a folder has both.
func (r *explainReader) isWritten(name string) bool {
	return slices.ContainsFunc(r.written, func(s samples.RankSnapshot) bool { return s.Path == filepath.Clean(name) })
}

// headOfFile is how many bytes tell what a file is. Configuration files are smaller.
const headOfFile = 1 << 20

// read reads a file by its content.
func (r *explainReader) read(name string, file io.Reader) error {
	watched, end := r.watch(name, file)
	defer end()
	from := bufio.NewReaderSize(watched, headOfFile)
	head, err := from.Peek(headOfFile)
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return &fault.Input{Where: fault.File(name), Err: err}
	case len(head) == 0:
		r.refuse(name, "empty file", fault.File(name).Inputf("the file is empty"))
		return nil
	case snapshot.Recognize(head):
		if !r.isWritten(name) {
			r.snapshots = append(r.snapshots, name)
		}
		return nil
	case isPlan(head):
		return r.plan(name)
	case err != nil: // the head is all of it
		if r.configuration(name, head) {
			return nil
		}
	}
	text, err := evidence.Open(name, from)
	switch {
	case err != nil:
		return err
	case text.Archive == evidence.Tar:
		return r.tar(text)
	case text.Archive == evidence.Zip:
		return r.zip(name, file)
	}
	return r.text(text)
}

// longRead is the size from which on a file may take seconds: it may be compressed.
const longRead = 4 << 20

// watch returns a reader that says how far a long file has been read, and what to call at its end.
func (r *explainReader) watch(name string, from io.Reader) (watched io.Reader, end func()) {
	file, isFile := from.(*os.File)
	if r.progress == nil || !isFile {
		return from, func() {}
	}
	info, err := file.Stat()
	if err != nil || info.Size() < longRead {
		return from, func() {}
	}
	r.progress.Begin("reading "+name, info.Size(), activity.Bytes)
	return &watchedReader{from, r.progress}, r.progress.End
}

// watchedReader says how much of a file has been read.
type watchedReader struct {
	io.Reader
	progress activity.Progress
}

func (w *watchedReader) Read(to []byte) (int, error) {
	n, err := w.Reader.Read(to)
	w.progress.Advance(int64(n))
	return n, err
}

// text reads the text of a file, or of a file in an archive.
func (r *explainReader) text(text *evidence.Text) error {
	head, err := text.Peek(4 << 10)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	if schemaOf(head) == samples.Schema {
		return r.recording(text.Name(), text)
	}
	source, err := text.Source()
	if err != nil {
		return err
	}
	r.in.Sources = append(r.in.Sources, source)
	return nil
}

func isPlan(head []byte) bool {
	return bytes.Contains(head[:min(len(head), 4096)], []byte(`"`+report.PlanSchema+`"`))
}

// schemaOf returns the schema of a recording, whose first line names it.
func schemaOf(head []byte) string {
	first, _, _ := bytes.Cut(head, []byte("\n"))
	if bytes.HasPrefix(first, []byte("{")) && bytes.Contains(first, []byte(`"`+samples.Schema+`"`)) {
		return samples.Schema
	}
	return ""
}

func (r *explainReader) recording(name string, from io.Reader) error {
	recording := explain.NewRecording(name)
	_, err := samples.Read(name, from, func(record *samples.Record) error {
		recording.Add(record)
		return nil
	})
	r.in.Recordings = append(r.in.Recordings, recording)
	return err
}

func (r *explainReader) plan(name string) error {
	d, err := report.ReadPlan(name)
	if err != nil {
		return err
	}
	r.addPlan(name, d)
	return nil
}

func (r *explainReader) addPlan(name string, d *report.PlanDocument) {
	r.in.Plans = append(r.in.Plans, explain.Plan{File: name, Parameters: d.Model.Trained, Devices: d.Devices})
	if r.request.Model == "" && r.request.Megatron == "" {
		r.request = d.Request
	}
}

// configuration takes a file of the job's configuration, as plan takes it. It reports whether the file is one.
func (r *explainReader) configuration(name string, text []byte) bool {
	q := &r.request
	to := map[string]*string{"--model": &q.Model, "--deepspeed": &q.DeepSpeed, "--training-args": &q.TrainingArgs,
		"--accelerate": &q.Accelerate, "--adapter": &q.Adapter, "--quantization": &q.Quantization,
		"--config": &r.program, recipe.MegatronFlag: &q.Megatron}
	kind, flag := recipe.KindOf(name, text)
	if to[flag] == nil || *to[flag] != "" {
		return false
	}
	*to[flag] = name
	if flag == "--config" {
		q.Configs = append(slices.Clone(q.Configs), name)
	} else {
		kind = strings.TrimPrefix(flag, "--") + " configuration"
	}
	r.in.Configurations = append(r.in.Configurations, explain.File{Name: name, Kind: kind})
	return true
}
