package ladder

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"slices"
	"time"
)

// journal writes what restores the settings to a file, before the first
// change: it outlives a crash of the sweep.
func (p SweepPlan) journal() error {
	if p.Journal == "" {
		return nil
	}
	var all []Undo
	seen := map[Setter]bool{}
	for _, r := range p.Rounds {
		s := p.Setters[r.Factor]
		if seen[s] {
			continue
		}
		seen[s] = true
		undo, err := s.Undo(r.Factor, p.base())
		if err != nil {
			return fmt.Errorf("noting how %s is now: %w", r.Factor, err)
		}
		all = append(all, undo...)
	}
	b, err := json.MarshalIndent(all, "", " ")
	if err != nil {
		return err
	}
	f, err := os.OpenFile(p.Journal, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
	if errors.Is(err, fs.ErrExist) {
		return fmt.Errorf("%s is left from a sweep that did not end: run weir sweep --restore first (or remove the file, if its settings are in order)", p.Journal)
	}
	if err != nil {
		return err
	}
	_, err = f.Write(b)
	return errors.Join(err, f.Sync(), f.Close())
}

// ErrNotRestored tells that a sweep left settings changed.
var ErrNotRestored = errors.New("the settings could not be restored")

// restoreTime bounds the restoring, which goes on after a Ctrl-C.
const restoreTime = 2 * time.Minute

func (p SweepPlan) restore(ctx context.Context) error {
	var all error
	closed := map[Setter]bool{}
	for _, s := range p.Setters {
		if !closed[s] {
			closed[s] = true
			all = errors.Join(all, s.Close())
		}
	}
	if p.Journal != "" {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), restoreTime)
		defer cancel()
		if err := Restore(ctx, p.Journal); err != nil && !errors.Is(err, fs.ErrNotExist) {
			all = errors.Join(all, fmt.Errorf("%w: %w; try weir sweep --restore", ErrNotRestored, err))
		}
	}
	return all
}

// Restore does what a sweep's journal says, files first, and removes the
// journal if all of it could be done.
func Restore(ctx context.Context, journal string) error {
	b, err := os.ReadFile(journal)
	if err != nil {
		return err
	}
	var all []Undo
	if err := json.Unmarshal(b, &all); err != nil {
		return fmt.Errorf("%s: %w", journal, err)
	}
	slices.SortStableFunc(all, func(a, b Undo) int { return a.order() - b.order() })
	for _, u := range all {
		if err := u.do(ctx); err != nil {
			return err
		}
	}
	return os.Remove(journal)
}

func (u Undo) order() int {
	if u.File != "" {
		return 0
	}
	return 1
}

func (u Undo) do(ctx context.Context) error {
	switch {
	case u.File != "":
		now, err := os.ReadFile(u.File)
		if err == nil && string(now) == string(u.Content) {
			return nil
		}
		return os.WriteFile(u.File, u.Content, 0o644)
	case u.Command != "":
		return shell(ctx, u.Command)
	case u.HTTP != "":
		return makeCall(ctx, u.HTTP)
	}
	return nil
}
