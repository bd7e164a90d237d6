//go:build linux

package main

import (
	"cmp"
	"os"
	"strings"

	"github.com/spf13/cobra"

	"plimsoll/internal/base/fault"
	"plimsoll/internal/base/ledger"
	"plimsoll/internal/state/service"
	"plimsoll/internal/state/tier"
)

// tierOptions are the flags of a tier on disks.
type tierOptions struct {
	list    string // folders, with commas between them
	folders []string
	memory  bytesFlag
}

// tierVariable and tierMemoryVariable are variables of the environment that say what the flags say.
const (
	tierVariable       = "PLIMSOLL_TIER"
	tierMemoryVariable = "PLIMSOLL_TIER_MEMORY"
)

// tierFlags adds the flags of a tier, with their values unless they are given.
func tierFlags(c *cobra.Command, o *tierOptions, otherwise tierOptions) {
	*o = otherwise
	c.Flags().StringVar(&o.list, "tier", otherwise.list, "hold the state in files in these `folders`, with commas "+
		"between them: one on each disk")
	c.Flags().Var(&o.memory, "memory", "memory for what is between the --tier and the updates: a `size` such as 512MiB")
}

// check finds the folders that were given.
func (o *tierOptions) check(c *cobra.Command) (err error) {
	if o.list == "" {
		if c.Flags().Changed("memory") && !c.Flags().Changed("tier") {
			return fault.Inputf("--memory is about the window of a tier, and there is no --tier").
				WithHint("--tier /mnt/nvme --memory " + o.memory.String())
		}
		return nil
	}
	o.folders, err = tier.Folders(strings.Split(o.list, ","))
	return err
}

// tierOfService returns what the environment says of the tier of a service.
func tierOfService() (o tierOptions, err error) {
	o.list = os.Getenv(tierVariable)
	size := cmp.Or(os.Getenv(tierMemoryVariable), tier.DefaultMemory.String())
	return o, o.memory.Set(strings.ReplaceAll(size, " ", ""))
}

// tier returns the tier for a service.
func (o *tierOptions) tier() service.Tier {
	return service.Tier{Folders: o.folders, Memory: ledger.Bytes(o.memory)}
}
