//go:build !page

package main

import (
	"slices"

	"github.com/spf13/cobra"

	"plimsoll/internal/after/snapshot"
	"plimsoll/internal/base/fault"
	"plimsoll/internal/show/report"
)

// snapshotOptions are the flags of questions about memory snapshots.
type snapshotOptions struct {
	top          countFlag
	at           string
	diff         bool
	whatIf       string
	emptyCacheAt string
	format       report.Format
}

// standardRows is how many lines of the source a page shows.
const standardRows = 10

func snapshotFlags(c *cobra.Command, o *snapshotOptions) {
	flags := c.Flags()
	o.top = standardRows
	flags.Var(&o.top, "top", "lines of the source to show, the largest holders first")
	flags.StringVar(&o.at, "at", "", "`time` of the trace: peak, oom, dump, the number of an entry, a time since "+
		"the first entry such as 1.5s, one before the last such as -200ms, or a date (default: oom if an "+
		"allocation failed, else peak)")
	flags.BoolVar(&o.diff, "diff", false, "compare two snapshots line by line of the source")
	flags.StringVar(&o.whatIf, "what-if", "", "replay the trace with these `settings` of PYTORCH_CUDA_ALLOC_CONF, "+
		"such as expandable_segments:True")
	flags.StringVar(&o.emptyCacheAt, "empty-cache-at", "",
		"replay the trace with torch.cuda.empty_cache() at this `time`")
}

// runSnapshot answers questions about a snapshot. The exit code is 5 if an allocation of its trace failed.
func runSnapshot(c *cobra.Command, o snapshotOptions, names []string) error {
	expected := 1
	if o.diff {
		expected = 2
	}
	if len(names) != expected {
		return fault.Inputf("%d snapshots were named, expected %d", len(names), expected).
			WithHint("name one snapshot, or two with --diff")
	}
	s, devices, err := openSnapshot(names[len(names)-1])
	if err != nil {
		return err
	}
	document := report.NewSnapshot(c.Root().Version, names[len(names)-1], s, int(o.top))
	failed := false
	for _, d := range devices {
		failed = failed || len(d.Failures()) > 0
		entry, err := d.Entry(o.time(d))
		if err != nil {
			return err
		}
		if err := o.replays(s, d, document, document.Add(d, entry)); err != nil {
			return err
		}
	}
	if o.diff {
		if err := o.compare(document, names[0], devices); err != nil {
			return err
		}
	}
	page := document.Page()
	if c.Flags().Changed("top") { // so many lines were asked for, however long the page becomes
		page.Brief = nil
	}
	if err := present(c, page, o.format); err != nil {
		return err
	}
	if failed && !o.diff {
		return outcome(exitFailed)
	}
	return nil
}

func openSnapshot(name string) (*snapshot.Snapshot, []*snapshot.Device, error) {
	s, err := snapshot.Open(name)
	if err != nil {
		return nil, nil, err
	}
	devices, err := s.Devices()
	return s, devices, err
}

// time returns the time of the holders.
func (o *snapshotOptions) time(d *snapshot.Device) string {
	switch {
	case o.at != "":
		return o.at
	case !o.diff && len(d.Failures()) > 0:
		return "oom"
	}
	return "peak"
}

// replays adds what other settings would have reserved, beside a replay of the snapshot's own.
func (o *snapshotOptions) replays(s *snapshot.Snapshot, d *snapshot.Device, document *report.Snapshot,
	to *report.SnapshotDevice) error {
	if o.whatIf == "" && o.emptyCacheAt == "" {
		return nil
	}
	if d.Entries() == 0 {
		return fault.Inputf("device %d has no trace to replay", d.Number).
			WithHint("record one with torch.cuda.memory._record_memory_history()")
	}
	settings, err := s.Configuration()
	if err != nil {
		return err
	}
	own, err := d.Replay(settings, snapshot.NoEmptyCache)
	if err != nil {
		return err
	}
	to.AddReplay("replayed", s.Settings.Configuration, own)
	document.NoteReplay(to, own)
	emptyAt := snapshot.NoEmptyCache
	if o.emptyCacheAt != "" {
		if emptyAt, err = d.Entry(o.emptyCacheAt); err != nil {
			return err
		}
	}
	name := "what if"
	if o.whatIf != "" {
		if settings, err = snapshot.ParseSettings(o.whatIf); err != nil {
			return err
		}
	}
	if o.emptyCacheAt != "" {
		name += ", cache emptied at " + o.emptyCacheAt
	}
	other, err := d.Replay(settings, emptyAt)
	if err != nil {
		return err
	}
	to.AddReplay(name, o.whatIf, other)
	return nil
}

// compare adds the changes since an older snapshot. A device that one of the two lacks holds nothing there.
func (o *snapshotOptions) compare(document *report.Snapshot, name string, newer []*snapshot.Device) error {
	_, older, err := openSnapshot(name)
	if err != nil {
		return err
	}
	holders := func(d *snapshot.Device) ([]snapshot.Holder, error) {
		entry, err := d.Entry(o.time(d))
		return d.Holders(entry), err
	}
	for i, d := range newer {
		after, err := holders(d)
		if err != nil {
			return err
		}
		var before []snapshot.Holder
		if n := slices.IndexFunc(older, func(x *snapshot.Device) bool { return x.Number == d.Number }); n >= 0 {
			if before, err = holders(older[n]); err != nil {
				return err
			}
		}
		document.Devices[i].Compare(snapshot.Changes(before, after))
	}
	return nil
}
