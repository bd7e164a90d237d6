package main

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"plimsoll/internal/plan/job"
)

// tierOnPaperFlags adds the flags of a tier that is planned. Folders need not be on this host: their number counts.
func tierOnPaperFlags(c *cobra.Command, t *job.Tier, what string) {
	c.Flags().Var(&disksFlag{t}, "tier", what+" in files in these `folders` of each node, with commas between them: "+
		"one on each disk")
	c.Flags().Var((*bytesFlag)(&t.Memory), "memory", "memory of a node for what is between the --tier and the "+
		"updates: a `size` such as 512MiB (default: 1GiB)")
}

// disksFlag counts folders.
type disksFlag struct{ *job.Tier }

func (d disksFlag) Type() string { return "folders" }

func (d disksFlag) String() string { return "" }

func (d disksFlag) Set(text string) error {
	folders := strings.Split(text, ",")
	for i, folder := range folders {
		folders[i] = filepath.Clean(folder)
		if folder == "" || slices.Contains(folders[:i], folders[i]) {
			return fmt.Errorf("found %q, expected folders that differ, with commas between them", text)
		}
	}
	d.Disks = len(folders)
	return nil
}
